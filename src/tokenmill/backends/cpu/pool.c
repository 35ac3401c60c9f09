#include "pool.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

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
    /* The loop that runs: written before `round` is counted up, read after it was seen. */
    tm_body body;
    void *context;
    int32_t count, grain;
    _Atomic int32_t next;
    _Atomic uint32_t round;
    _Atomic int32_t busy; /* workers that have not finished this round */
    _Atomic int32_t asleep;
    _Atomic int32_t waits; /* does the caller sleep? */
    int32_t stops;
};

static void run_pieces(tm_pool *pool) {
    for (;;) {
        int32_t begin = atomic_fetch_add_explicit(&pool->next, pool->grain, memory_order_relaxed);
        if (begin >= pool->count) return;
        int32_t end = begin + pool->grain;
        pool->body(pool->context, begin, end < pool->count ? end : pool->count);
    }
}

static void wait_for_round(tm_pool *pool, uint32_t seen) {
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&pool->round, memory_order_acquire) != seen) return;
        RELAX();
    }
    pthread_mutex_lock(&pool->lock);
    atomic_fetch_add(&pool->asleep, 1);
    while (atomic_load(&pool->round) == seen) pthread_cond_wait(&pool->work, &pool->lock);
    atomic_fetch_sub(&pool->asleep, 1);
    pthread_mutex_unlock(&pool->lock);
}

static void *work(void *argument) {
    tm_pool *pool = argument;
    uint32_t seen = 0;
    for (;;) {
        wait_for_round(pool, seen);
        seen++;
        if (pool->stops) return NULL;
        run_pieces(pool);
        if (atomic_fetch_sub(&pool->busy, 1) == 1 && atomic_load(&pool->waits)) {
            pthread_mutex_lock(&pool->lock);
            pthread_cond_signal(&pool->done);
            pthread_mutex_unlock(&pool->lock);
        }
    }
}

static void start_round(tm_pool *pool) {
    atomic_store(&pool->busy, pool->num_threads - 1);
    atomic_fetch_add(&pool->round, 1);
    if (atomic_load(&pool->asleep)) {
        pthread_mutex_lock(&pool->lock);
        pthread_cond_broadcast(&pool->work);
        pthread_mutex_unlock(&pool->lock);
    }
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
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    start_round(pool);
    run_pieces(pool);
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&pool->busy, memory_order_acquire) == 0) return;
        RELAX();
    }
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->waits, 1);
    while (atomic_load(&pool->busy) != 0) pthread_cond_wait(&pool->done, &pool->lock);
    atomic_store(&pool->waits, 0);
    pthread_mutex_unlock(&pool->lock);
}

int32_t tm_pool_threads(const tm_pool *pool) { return pool == NULL ? 1 : pool->num_threads; }

tm_pool *tm_pool_new(int32_t num_threads) {
    tm_pool *pool = calloc(1, sizeof *pool);
    if (pool == NULL) return NULL;
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
    pool->stops = 1;
    pthread_mutex_lock(&pool->lock);
    atomic_fetch_add(&pool->round, 1);
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (int32_t i = 1; i < pool->num_threads; i++) pthread_join(pool->threads[i], NULL);
    pthread_mutex_destroy(&pool->lock);
    pthread_cond_destroy(&pool->work);
    pthread_cond_destroy(&pool->done);
    free(pool->threads);
    free(pool);
}
