/* `tm_parallel`: a loop over [0, count) on all threads of a pool. */
#ifndef TOKENMILL_POOL_H
#define TOKENMILL_POOL_H

#include "kernels.h"

typedef void (*tm_body)(void *context, int32_t begin, int32_t end);

/* Pieces of at most `grain` are handed out as threads ask for them, so that one that is kept from running holds up
 * little. Pieces that depend on each other are no use here; what each one writes must be its own. */
void tm_parallel(tm_pool *pool, tm_body body, void *context, int32_t count, int32_t grain);
int32_t tm_pool_threads(const tm_pool *pool);

#endif
