// Bodies of all kernels, under the rules of vector_impl.h.
#include "cpu/forest_kernels_impl.h"
#include "cpu/logit_kernels_impl.h"
#include "cpu/mixture_row_kernels_impl.h"
#include "cpu/path_log_prob_kernels_impl.h"
#include "cpu/sparse_adam_impl.h"
#include "cpu/tree_log_softmax_kernels_impl.h"
#include "cpu/tree_mix_kernels_impl.h"
#include "cpu/wide_log_prob_kernels_impl.h"
