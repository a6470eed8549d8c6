#include "cpu/row_kernels.h"

#define HSTREE_CAPABILITY portable
#define HSTREE_VECTOR_BYTES 16
#include "cpu/row_kernels_impl.h"
