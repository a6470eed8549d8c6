#include "cpu/logit_kernels.h"
#include "cpu/mixture_row_kernels.h"
#include "cpu/path_log_prob_kernels.h"
#include "cpu/sparse_adam.h"
#include "cpu/tree_log_softmax.h"
#include "cpu/wide_log_prob_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define HSTREE_CAPABILITY portable
#define HSTREE_VECTOR_BYTES 16
#include "cpu/logit_kernels_impl.h"
#include "cpu/mixture_row_kernels_impl.h"
#include "cpu/path_log_prob_kernels_impl.h"
#include "cpu/sparse_adam_impl.h"
#include "cpu/tree_log_softmax_kernels_impl.h"
#include "cpu/tree_mix_kernels_impl.h"
#include "cpu/wide_log_prob_kernels_impl.h"
