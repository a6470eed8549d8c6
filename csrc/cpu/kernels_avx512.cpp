#include "cpu/logit_kernels.h"
#include "cpu/mixture_row_kernels.h"
#include "cpu/path_log_prob_kernels.h"
#include "cpu/sparse_adam.h"
#include "cpu/tree_log_softmax.h"
#include "cpu/wide_log_prob_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif

#define HSTREE_CAPABILITY avx512
#define HSTREE_VECTOR_BYTES 64
#include "cpu/logit_kernels_impl.h"
#include "cpu/mixture_row_kernels_impl.h"
#include "cpu/path_log_prob_kernels_impl.h"
#include "cpu/sparse_adam_impl.h"
#include "cpu/tree_log_softmax_kernels_impl.h"
#include "cpu/tree_mix_kernels_impl.h"
#include "cpu/wide_log_prob_kernels_impl.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
