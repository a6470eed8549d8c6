#include "cpu/kernels.h"

#define HSTREE_CAPABILITY portable
#define HSTREE_VECTOR_BYTES 16
#include "cpu/kernels_impl.h"
