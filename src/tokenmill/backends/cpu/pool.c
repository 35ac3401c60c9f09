#include "pool.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) || defined(__i386__)
#define RELAX() __builtin_ia32_pause()
#else
#define RELAX() atomic_signal_fence(memory_order_seq_cst)
#endif

/* About 20 to 60 microseconds: longer than the gaps inside a step, shorter than anybody else would notice. */
#define SPINS 2000

struct tm_pool {
    int32_t num_threads;
    pthread_t *threads;
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    /* The loop that runs. It does not change while a thread has a piece of it that is not counted as finished. */
    tm_body body;
    void *context;
    int32_t count, grain, num_pieces;
    _Alignas(64) _Atomic uint64_t left; /* the loop's number, and in the lower half its pieces that nobody has taken */
    _Alignas(64) _Atomic int32_t unfinished; /* pieces */
    _Atomic int32_t asleep; /* workers that have not been woken */
    _Atomic int32_t waits;  /* does the caller sleep? */
    _Atomic int32_t stops;
};

static int32_t pieces_in(uint64_t left) { return (int32_t)(left & 0xffffffff); }

/* Run pieces until none is left to take; returns how many. */
static int32_t run_pieces(tm_pool *pool) {
    int32_t num_run = 0;
    uint64_t left = atomic_load(&pool->left);
    while (pieces_in(left)) {
        if (!atomic_compare_exchange_weak(&pool->left, &left, left - 1)) continue;
        int32_t begin = (pool->num_pieces - pieces_in(left)) * pool->grain, rest = pool->count - begin;
        pool->body(pool->context, begin, begin + (rest < pool->grain ? rest : pool->grain));
        num_run++;
        left = atomic_load(&pool->left);
    }
    if (num_run && atomic_fetch_sub(&pool->unfinished, num_run) == num_run && atomic_load(&pool->waits)) {
        pthread_mutex_lock(&pool->lock);
        pthread_cond_signal(&pool->done);
        pthread_mutex_unlock(&pool->lock);
    }
    return num_run;
}

/* Until there may be work. */
static void sleep_until_woken(tm_pool *pool) {
    pthread_mutex_lock(&pool->lock);
    atomic_fetch_add(&pool->asleep, 1);
    if (pieces_in(atomic_load(&pool->left)) || atomic_load(&pool->stops))
        atomic_fetch_sub(&pool->asleep, 1);
    else
        pthread_cond_wait(&pool->work, &pool->lock); /* whoever wakes it counts it out */
    pthread_mutex_unlock(&pool->lock);
}

static void wake_all(tm_pool *pool) {
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->asleep, 0);
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
}

static void *work(void *argument) {
    tm_pool *pool = argument;
    for (int32_t i = 0; !atomic_load(&pool->stops); i++) {
        if (run_pieces(pool)) i = 0;
        else if (i >= SPINS) sleep_until_woken(pool), i = 0;
        else RELAX();
    }
    return NULL;
}

void tm_parallel(tm_pool *pool, tm_body body, void *context, int32_t count, int32_t grain) {
    if (count <= 0) return;
    if (pool == NULL || pool->num_threads == 1 || count <= grain) {
        body(context, 0, count);
        return;
    }
    pool->body = body;
    pool->context = context;
    pool->count = count;
    pool->grain = grain;
    pool->num_pieces = (count - 1) / grain + 1;
    atomic_store(&pool->unfinished, pool->num_pieces);
    atomic_store(&pool->left, ((atomic_load(&pool->left) >> 32) + 1) << 32 | (uint32_t)pool->num_pieces);
    if (atomic_load(&pool->asleep)) wake_all(pool);
    run_pieces(pool);
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load(&pool->unfinished) == 0) return;
        RELAX();
    }
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->waits, 1);
    while (atomic_load(&pool->unfinished) != 0) pthread_cond_wait(&pool->done, &pool->lock);
    atomic_store(&pool->waits, 0);
    pthread_mutex_unlock(&pool->lock);
}

int32_t tm_pool_threads(const tm_pool *pool) { return pool == NULL ? 1 : pool->num_threads; }

tm_pool *tm_pool_new(int32_t num_threads) {
    tm_pool *pool = aligned_alloc(64, sizeof *pool);
    if (pool == NULL) return NULL;
    memset(pool, 0, sizeof *pool);
    if (num_threads < 1) num_threads = 1;
    pool->num_threads = num_threads;
    pool->threads = calloc((size_t)num_threads, sizeof *pool->threads);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->done, NULL);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the program's, not ours */
    for (int32_t i = 1; i < num_threads; i++) {
        if (pool->threads == NULL || pthread_create(&pool->threads[i], NULL, work, pool) != 0) {
            pool->num_threads = i; /* as many as there are */
            break;
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return pool;
}

void tm_pool_free(tm_pool *pool) {
    if (pool == NULL) return;
    atomic_store(&pool->stops, 1);
    wake_all(pool);
    for (int32_t i = 1; i < pool->num_threads; i++) pthread_join(pool->threads[i], NULL);
    pthread_mutex_destroy(&pool->lock);
    pthread_cond_destroy(&pool->work);
    pthread_cond_destroy(&pool->done);
    free(pool->threads);
    free(pool);
}
