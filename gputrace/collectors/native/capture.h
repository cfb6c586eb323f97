/* When CUPTI records, and when it is out of the program's way: a state machine.
 *
 *     OFF --> ARMED --> RECORDING --> HOLDING --> LEAVING --> LEFT --> ARMED
 *
 *     OFF        there is no CUPTI: cuInit was not called yet, no window was opened yet where CUPTI is to be late,
 *                or no usable libcupti was found
 *     ARMED      CUPTI is loaded and ours, but records nothing and has no records
 *     RECORDING  a window: CUPTI records kernels, copies, memsets and calls
 *     HOLDING    a window has ended, for good or for a control stretch; CUPTI stays for `hold_ns`, so that
 *                work still running on the GPU is handed over with its times and the next window is cheap; with
 *                `leaves_early`, only until all of that is handed over
 *     LEAVING    a CUDA call of the writer's, or else the next one of the program, calls cuptiFinalize as it returns
 *     LEFT       it has; the thread of writer.c is to note when
 *
 * Every transition is made by `move_to` in capture.c. These are allowed:
 *
 *     from       to         when
 *     OFF        ARMED      cuInit or the first window has found CUPTI
 *     ARMED      RECORDING  a window begins
 *     RECORDING  HOLDING    it ends, a control stretch begins, another profiler begins, the process ends
 *     HOLDING    RECORDING  the next window begins, or the stretch is over
 *     HOLDING    LEAVING    it was held for long enough and may be let go of
 *     HOLDING    ARMED      it was, and may not, or is to stay idle in this stretch
 *     LEAVING    LEFT       a call has returned
 *     LEAVING    ARMED      a window or another profiler begins first, or the process ends
 *     LEFT       ARMED      that was noted, which whoever comes first does
 *     (any)      OFF        in a forked child
 *
 * The state follows three requests: RECORDING is left or entered when `wanted && !paused && !ended` changes,
 * which `settle` looks at after each of them. While another profiler has CUPTI (`paused`), and once the
 * process ends (`ended`), the state is OFF, ARMED or HOLDING, and HOLDING is not left by time.
 *
 * Threads that call functions of this file: any of the program's, by the hooks or from within a CUDA call;
 * the thread of writer.c; the one that forks or ends the process. CUPTI's own thread does not.
 *
 * Locks: `lock` serialises all requests and transitions. The locks of buffers.c, spool.c and threads.c may be
 * taken while it is held, and none of them may be held when it is taken. cuptiFinalize is called with it, by a
 * thread that only tries to take it.
 */
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

enum capture_state { OFF, ARMED, RECORDING, HOLDING, LEAVING, LEFT };

struct capture {
    pthread_mutex_t lock;
    /* Written with the lock held. Read without it by NVTX ranges, by CUDA calls that end, and by a flush, all
     * of which may be late by one transition. */
    _Atomic(enum capture_state) state;

    /* Requests. The first two are read like the state; all others are read and written with the lock held. */
    atomic_int wanted; /* a window is open */
    atomic_int paused; /* another profiler of the program has CUPTI */
    int ended;         /* the process ends, or the disk takes no more: final */
    int is_full;       /* the recording is as large as it may become: no window opens any more */
    int has_made_way;  /* another profiler has had CUPTI, and may have kept its place for a subscriber */

    /* In RECORDING. */
    int keeps_calls;   /* calls are kept, and not left out; true is what a file says that says nothing */
    int records_nodes; /* nodes of CUDA graphs are recorded, not whole replays */
    int was_off;       /* for a time: graphs may have been made without CUPTI's knowledge */
    int leaves_out_replays; /* for good, see begin_window */

    /* In HOLDING: how long it lasts, which is `usual_hold_ns` after a window, and since when (CLOCK_MONOTONIC).
     * What follows is LEAVING, or ARMED for a stretch with an idle CUPTI.
     *
     * An idle CUPTI costs a step too little to be seen in the few of a control stretch, while each return of
     * CUPTI costs a third of a step by the dearer way to choose calls (ResNet-18 and GPT-2 on an H100, CUPTI
     * 13.0). Over longer times even an idle CUPTI costs something. */
    uint64_t usual_hold_ns, hold_ns, holding_since;
    int stays_idle;

    /* In HOLDING: CUPTI leaves as soon as it can. Idle, it makes steps that wait for their launches longer by a third,
     * and the GPU may have done all of the window a millisecond after it. */
    int leaves_early;

    /* CUPTI is not loaded before the first window: idle, it makes steps that wait for their launches longer. */
    int is_late;

    /* Of the CUPTI that was found. */
    uint32_t version;
    int hazards;       /* see hazards.h */
    int has_clock;     /* ours is registered with it */
};

/* Whether to record from the start of CUDA on, or from later, and then with CUPTI from the start of CUDA, or from
 * the first window on; whether cudaProfilerStart and Stop open and close windows, and for how many nanoseconds to
 * hold CUPTI after one. */
void capture_init(int from_start, int from_later, int is_late, int by_profiler, uint64_t hold_ns);

/* Whether there is to be no CUPTI before the first window. */
int capture_is_late(void);

/* Called in cuInit, before there is a context, or late, by the thread that opens the first window: finds CUPTI and
 * arms it, or notes why that cannot be. */
void capture_start(void);

/* Opens or closes a window. */
void capture_set_window(int on);

/* Ends a window for a control stretch, or for good: with STAYS_IDLE CUPTI stays, and is idle after HOLD_NS; else it is
 * let go of as soon as it has handed over all, and after HOLD_NS at the latest. Returns 0; -1, with nothing changed,
 * where nothing is recorded or CUPTI cannot be let go of in this program. capture_set_window(1) ends the stretch. */
int capture_begin_stretch(uint64_t hold_ns, int stays_idle);

/* Begins or stops recording the nodes of CUDA graphs in place of whole replays. Returns 0; -1, with nothing
 * changed, where nothing is recorded, or no graph was replayed whose nodes are unknown. */
int capture_record_nodes(int on);

/* Makes way for another user of CUPTI, and comes back. */
void capture_pause(int pause);

/* Before a profiler begins that lets go of CUPTI at its end: keeps CUPTI from it where the program's CUDA
 * graphs would not survive that (hazards.c), and goes on recording. Returns 0; -1 where it may have CUPTI. */
int capture_keep_cupti(void);

/* Whether what happens now belongs to the recording. */
int capture_is_on(void);

/* Has CUPTI hand over what is complete, or with FORCE all that it has. */
void capture_flush(uint32_t force);

/* For the writer: decodes what CUPTI has handed over, after a flush where FLUSH says so, and moves on from
 * HOLDING and LEFT. Returns -1 once the disk took no more. */
int capture_take_records(int flush);

/* For the writer: leaves out calls where there are too many, or keeps them again. Returns when to look next,
 * at that or at the end of HOLDING, on CLOCK_MONOTONIC. */
uint64_t capture_update_sampling(uint64_t now);

/* Notes in a new file that recording goes on. */
void capture_note_state(void);

/* Closes the window for good and lets go of CUPTI at the next capture_take_records; the program goes on. */
void capture_stop_for_good(void);

/* Stops recording as the process ends, or the disk takes no more. */
void capture_end(void);

/* Around a fork. A child has no CUPTI and records nothing. */
void capture_lock(void);
void capture_unlock(void);
void capture_reset_in_child(void);
