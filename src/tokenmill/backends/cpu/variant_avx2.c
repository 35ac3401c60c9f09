/* The decoder for one kind of machine; which one is said by the compiler's flags. */
#include <stdlib.h>

#include "blocks.h"
#include "kernels.h"
#include "lanes.h"
#include "pool.h"

#define NAME(function) function##_avx2

#include "product.h"

#include "decoder.h"
