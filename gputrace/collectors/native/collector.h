/* The life of the collector in a process.
 *
 * The CUDA driver loads this library into every process that starts CUDA, by way of CUDA_INJECTION64_PATH, and
 * NVTX clients load it by way of NVTX_INJECTION64_PATH; exports.c has what they and the hooks call. CUPTI
 * fills buffers and hands them over; a thread of ours decodes them and appends them to the process's spool.
 * Nothing here runs Python. CUDA calls of the program do not wait for that thread; its NVTX calls and forks
 * may, while some records are decoded or written.
 *
 * Files, of which each uses only ones further down:
 *
 *     exports                     what the driver, NVTX clients and the hooks call
 *     collector                   start, fork and end of the process
 *     writer, nvtx                the thread that writes; NVTX ranges of the program
 *     window                      --delay, --duration, --every
 *     capture                     when CUPTI records: the state machine
 *     subscriber, buffers         who is told of calls; records on their way to the spool
 *     decode, graphs              a record of CUPTI's; calls that make graphs
 *     calls, graph_nodes          which API calls CUPTI records; who captured the nodes of graphs
 *     cupti, call_sampling, threads  libcupti; which calls are kept; which thread a record is of
 *     hazards, devices, names     what CUPTI does not survive; GPUs; names in the spool
 *     spool                       the file
 *     system                      clocks, environment, signals
 *
 * Threads: those of the program, which come by way of exports.c and of subscriber.c; the one of writer.c; and
 * CUPTI's own, which calls buffers.c alone.
 *
 * Locks, in the order in which one thread may take several:
 *
 *     writer.c, collecting    while records are decoded, and CUPTI flushed or let go of
 *     capture.c, capture.lock requests and transitions
 *     buffers.c, lock         lists of buffers; held for a few instructions, with no other
 *     spool.c, spool_lock     the file, names (names.c), what is known of graphs (decode.c), the stretches in
 *                             which calls are left out (call_sampling.c), handles of NVTX (nvtx.c)
 *     threads.c, lock         known threads; held for a few instructions, with no other
 *     nvtx.c, started_lock    ranges that may end on another thread; held with no other
 *
 * Atomic, and so read without a lock: capture.state, wanted and paused (capture.c); whether the process is recorded
 * (collector.c) and the writer is to stop (writer.c); what buffers.c and decode.c have seen, and the numbering of
 * calls; counts of calls and steps (call_sampling.c); the thread that makes a graph (graphs.c); the list of nodes that
 * were made (graph_nodes.c).
 *
 * A fork takes the locks of capture.c, buffers.c and spool.c, so that the child finds what they guard whole; the
 * others are made anew in the child, which uses nothing that they guard.
 *
 * Environment: GPUTRACE_DIR, the folder of the spool; GPUTRACE_CAPTURE, when to record: all (the default),
 * profiler (from cudaProfilerStart to Stop), manual (gputrace_capture decides), late (the same, and there is no
 * CUPTI in the process until the first window); GPUTRACE_DELAY_NS and GPUTRACE_DURATION_NS, a window in the life of
 * the process, of which GPUTRACE_FOR_NS out of each
 * GPUTRACE_EVERY_NS; GPUTRACE_HOLD_NS, how long to hold CUPTI after a window (10 s by default);
 * GPUTRACE_SEGMENT_NS, how often to begin a new file, and GPUTRACE_SEGMENTS, how many older ones stay;
 * GPUTRACE_MAX_BYTES, what the folder may hold; GPUTRACE_API, which calls are kept, see call_sampling.h;
 * GPUTRACE_GRAPH_NODES, whether the nodes of graphs are noted; GPUTRACE_SERIAL_GRAPHS, see hazards.h;
 * GPUTRACE_HW_TRACE, to use hardware events, see capture.c; GPUTRACE_CUPTI and GPUTRACE_CUPTI_FOLDERS, see cupti.c.
 */
#pragma once

/* Opens the spool and starts the writer, once in a process; 0 where that went well. */
int collector_start(void);

/* Called in cuInit, once the collector has started: finds CUPTI and captures GPU activity, or leaves both to
 * collector_start_capture_if_due where that is to be late. */
void collector_enter_cuda(void);

/* Called when a window has opened or another profiler has ended: finds CUPTI if it was not to be there before. */
void collector_start_capture_if_due(void);

/* Whether this process is recorded: it has started, has not ended, and was not forked since. */
int collector_is_running(void);
