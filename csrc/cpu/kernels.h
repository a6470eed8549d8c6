// Declarations of all kernels. kernels_<capability>.cpp includes them before kernels_impl.h, so that no function of
// theirs is compiled for one instruction set.
#pragma once

#include "cpu/capability.h"
#include "cpu/forest_kernels.h"
#include "cpu/group_log_prob_kernels.h"
#include "cpu/logit_kernels.h"
#include "cpu/mixture_row_kernels.h"
#include "cpu/path_log_prob_kernels.h"
#include "cpu/preview_kernels.h"
#include "cpu/sparse_adam.h"
#include "cpu/tree_log_softmax.h"
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
