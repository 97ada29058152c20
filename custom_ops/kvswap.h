/* Copies of cache blocks between the tensors of the device tier and the block-major host pool: a plain C ABI.
 *
 * Conventions
 * - Functions return KVSWAP_OK or an error code; kvswap_last_error() then has one line for the calling thread.
 * - A copy checks all its arguments before a byte moves. A refused copy changes nothing.
 * - Sizes and pitches are bytes, slots are row numbers. Nothing here knows a dtype or a framework.
 * - Descriptors (rows, runs, slots) are read during the call only. The memory they describe must stay valid until
 *   the copy has run.
 */
#ifndef KVSWAP_H_
#define KVSWAP_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVSWAP_API __attribute__((visibility("default")))

/* Raised with every incompatible change of this file. */
#define KVSWAP_ABI 3

enum {
  KVSWAP_OK = 0,
  KVSWAP_INVALID = 1,       /* the arguments do not fit each other */
  KVSWAP_OUT_OF_MEMORY = 2, /* the system refused memory */
  KVSWAP_UNAVAILABLE = 3,   /* this machine or build cannot do it */
  KVSWAP_DRIVER = 4,        /* CUDA reported an error; earlier parts of the copy may have been submitted */
  KVSWAP_INTERNAL = 5       /* a bug */
};

/* How bytes move. AUTO chooses the cheapest; any other value forces one path, and is refused where that path cannot do
 * the copy. */
enum {
  KVSWAP_PATH_AUTO = 0,
  KVSWAP_PATH_MEMCPY = 1, /* CPU: memcpy of each contiguous range */
  KVSWAP_PATH_STREAM = 2, /* CPU: non-temporal stores, which leave the target out of the caches */
  KVSWAP_PATH_RUNS = 3,   /* CUDA: one cuMemcpyAsync or cuMemcpy2DAsync per run, or per row of runs */
  KVSWAP_PATH_BATCH = 4,  /* CUDA: cuMemcpyBatchAsync */
  KVSWAP_PATH_KERNEL = 5, /* CUDA: a kernel reads one side and writes the other; page-locked host memory only */
  KVSWAP_PATH_STAGED = 6  /* CUDA, to the host: the kernel gathers in device memory, one DMA per host block */
};

/* `num_rows` rows of `row_bytes` bytes, `pitch` bytes apart: all blocks of one layer's tensor of one role. */
typedef struct kvswap_rows {
  uint64_t address;
  int64_t num_rows;
  int64_t row_bytes;
  int64_t pitch;
} kvswap_rows;

/* `blocks` neighbouring source rows that go to as many neighbouring target rows. */
typedef struct kvswap_run {
  int64_t source;
  int64_t target;
  int64_t blocks;
} kvswap_run;

typedef struct kvswap_plan kvswap_plan;
typedef struct kvswap_event kvswap_event;

KVSWAP_API int kvswap_abi(void);
/* Digest of the sources this library was built from, "" for a build without one. */
KVSWAP_API const char* kvswap_sources(void);
KVSWAP_API const char* kvswap_last_error(void);

/* ---- plans: a checked, coalesced, immutable slot list. May be used by several threads; free it once. ---- */

/* Copies sources[i] to targets[i]. Refuses negative slots and a target named twice. */
KVSWAP_API int kvswap_plan_slots(const int64_t* sources, const int64_t* targets, int64_t count, kvswap_plan** plan);
/* The same from runs; they are kept as they are. */
KVSWAP_API int kvswap_plan_runs(const kvswap_run* runs, int64_t count, kvswap_plan** plan);
KVSWAP_API int64_t kvswap_plan_size(const kvswap_plan* plan);
KVSWAP_API const kvswap_run* kvswap_plan_data(const kvswap_plan* plan);
KVSWAP_API void kvswap_plan_free(kvswap_plan* plan);

/* ---- CPU copies: `entries` pairs of rows (one layer's roles, or those of all layers), one plan ---- */

/* On the calling thread. */
KVSWAP_API int kvswap_copy(const kvswap_rows* targets, const kvswap_rows* sources, int64_t entries,
                           const kvswap_plan* plan, int path);

/* ---- CPU queues: a FIFO with a thread of its own. Ids are never reused; 0 is no queue.
 *
 * Work belongs to units. A failure skips the rest of its unit; waits always happen. An event covers the work of its
 * unit up to where it was recorded. After fork() the child has no queues. ---- */

/* The first 15 characters of `name` become the thread's. */
KVSWAP_API int kvswap_queue_create(const char* name, uint64_t* queue);
/* Finishes what was submitted, then ends the thread. Not from that thread itself. */
KVSWAP_API int kvswap_queue_close(uint64_t queue);
KVSWAP_API int kvswap_queue_begin(uint64_t queue);
KVSWAP_API int kvswap_queue_copy(uint64_t queue, const kvswap_rows* targets, const kvswap_rows* sources,
                                 int64_t entries, const kvswap_plan* plan, int path);
/* Calls fn(context, failed) once, in its turn; a result other than 0 fails the unit with it. `failed` is 1 when the
 * unit has failed already: work is skipped then, but fn can let go of what `context` holds. */
KVSWAP_API int kvswap_queue_call(uint64_t queue, int64_t (*fn)(void*, int), void* context);
/* Later work waits for `event`. With `needs_data` its failure becomes this unit's, negated where it is positive. */
KVSWAP_API int kvswap_queue_wait(uint64_t queue, const kvswap_event* event, int needs_data);
KVSWAP_API int kvswap_queue_record(uint64_t queue, kvswap_event** event);
/* For the end of the process, before the functions and the memory that were given to queues are gone: from now on no
 * queue calls back or copies, work that was left fails with KVSWAP_STOPPED. Returns when no copy is running any more;
 * does not wait for a function that is running. */
KVSWAP_API void kvswap_queue_stop(void);
#define KVSWAP_STOPPED INT64_MAX

/* 1 when the event happened within `timeout_ns` (0: look once, negative: for ever), else 0. */
KVSWAP_API int kvswap_event_wait(const kvswap_event* event, int64_t timeout_ns);
/* What failed the covered work, 0 for nothing; and when it was, monotonic. Both only after the event happened. */
KVSWAP_API int64_t kvswap_event_failure(const kvswap_event* event);
KVSWAP_API int64_t kvswap_event_time_ns(const kvswap_event* event);
KVSWAP_API void kvswap_event_free(kvswap_event* event);

/* ---- host memory ---- */

/* Zeroed pages, on huge pages where the system gives them, bound to `numa_node` (-1: anywhere) as far as the system
 * lets us. Free with the same `nbytes`. */
KVSWAP_API int kvswap_host_alloc(int64_t nbytes, int numa_node, void** address);
KVSWAP_API int kvswap_host_free(void* address, int64_t nbytes);

/* ---- CUDA, through the driver library that is found at run time. A context must be current. ---- */

/* KVSWAP_OK where a driver library with all we need is present; says nothing about a GPU. */
KVSWAP_API int kvswap_cuda_available(void);
/* Whether this process has `path`: 1 or 0. STAGED needs `kvswap_cuda_set_staging`. */
KVSWAP_API int kvswap_cuda_has_path(int path);
/* The paths AUTO may choose from now on, a bit (1 << path) each; RUNS stays the last resort. A path that turns out not
 * to work on this GPU leaves the set by itself. */
KVSWAP_API int kvswap_cuda_allow(int paths);
KVSWAP_API int kvswap_cuda_allowed(void);
/* Enqueues on the raw `stream`, which must not be the legacy NULL stream. One side of the rows is page-locked host
 * memory, the other device memory; `to_device` says which. */
KVSWAP_API int kvswap_cuda_copy(const kvswap_rows* targets, const kvswap_rows* sources, int64_t entries,
                                const kvswap_plan* plan, int to_device, int path, uint64_t stream);

/* What the parts of a copy in one direction cost: nanoseconds, and bytes per nanosecond. */
typedef struct kvswap_costs {
  double call_ns;         /* of the thread: one cuMemcpyAsync or cuMemcpy2DAsync */
  double copy_ns;         /* of the GPU: starting one of them */
  double row_ns;          /* of the GPU: each row of a 2D copy */
  double engine_rate;     /* of a copy engine */
  double batch_ns;        /* of the thread: one cuMemcpyBatchAsync */
  double descriptor_ns;   /* of the thread: each of its copies */
  double batch_copy_ns;   /* of the GPU: starting each of its copies */
  double launch_ns;       /* of the thread: one kernel */
  double kernel_start_ns; /* of the GPU: one kernel */
  double kernel_rate;     /* of the kernel between host and device */
  double gather_rate;     /* of the kernel inside the device */
} kvswap_costs;
KVSWAP_API int kvswap_cuda_costs(int to_device, kvswap_costs* costs);
/* Refuses numbers that are not positive; nothing is changed then. For later copies of the process. */
KVSWAP_API int kvswap_cuda_set_costs(int to_device, const kvswap_costs* costs);

typedef struct kvswap_estimate {
  int64_t calls;       /* driver calls and kernel launches */
  int64_t descriptors; /* copies inside batches */
  double thread_ns;    /* of the submitting thread */
  double gpu_ns;
  double cost; /* what AUTO compares; infinite where the path cannot do the copy */
} kvswap_estimate;
/* What `path` would take for a copy, and (AUTO) of which path it would be; moves nothing. `chosen` may be null. */
KVSWAP_API int kvswap_cuda_estimate(const kvswap_rows* targets, const kvswap_rows* sources, int64_t entries,
                                    const kvswap_plan* plan, int to_device, int path, kvswap_estimate* estimate,
                                    int* chosen);
/* Device memory for STAGED, valid until it is replaced; 0 bytes: none. Copies that use it must have run. */
KVSWAP_API int kvswap_cuda_set_staging(uint64_t address, int64_t nbytes);
/* Blocks until everything on `stream` has run. */
KVSWAP_API int kvswap_cuda_synchronize(uint64_t stream);
/* ---- CUDA memory of other processes on this machine ---- */

/* What another process needs to map an allocation of this one. */
typedef struct kvswap_ipc_memory {
  uint8_t handle[64]; /* names the whole allocation; who has it may map it, and write it */
  uint64_t base;      /* where the allocation begins, in this process */
  int64_t nbytes;     /* of the allocation */
} kvswap_ipc_memory;
/* Of the allocation around `address`. KVSWAP_UNAVAILABLE for memory that cannot be exported: of cudaMallocAsync,
 * virtual or managed memory. */
KVSWAP_API int kvswap_cuda_ipc_export(uint64_t address, kvswap_ipc_memory* memory);
/* Maps what another process exported, on the GPU of the current context. KVSWAP_UNAVAILABLE where that cannot be: the
 * handle is of this process or of one that has ended, or the GPU cannot reach the other's memory. Close it once. */
KVSWAP_API int kvswap_cuda_ipc_open(const uint8_t* handle, uint64_t* base);
/* Copies from it must have run. */
KVSWAP_API int kvswap_cuda_ipc_close(uint64_t base);
/* The GPU that has the memory at `address`: its number in this process, and the 16 bytes that name it everywhere. */
KVSWAP_API int kvswap_cuda_device_of(uint64_t address, int* device, uint8_t* uuid);
/* `access` is 1 when `device` reaches the memory of GPU `uuid`, 0 when it does not, -1 when this process does not see
 * that GPU and so cannot tell. */
KVSWAP_API int kvswap_cuda_reaches(int device, const uint8_t* uuid, int* access);
/* Enqueues `count` copies on the raw `stream`, in any order: `source` and `target` of a run are addresses of device
 * memory, `blocks` are bytes. No byte may be written twice, or read and written. `path`: AUTO, RUNS or BATCH. */
KVSWAP_API int kvswap_cuda_copy_ranges(const kvswap_run* ranges, int64_t count, int path, uint64_t stream);

/* Page-locked memory of the driver's own, and page-locking of memory that is there already. */
KVSWAP_API int kvswap_cuda_host_alloc(int64_t nbytes, void** address);
KVSWAP_API int kvswap_cuda_host_free(void* address);
KVSWAP_API int kvswap_cuda_host_register(void* address, int64_t nbytes);
KVSWAP_API int kvswap_cuda_host_unregister(void* address);

#ifdef __cplusplus
}
#endif

#endif /* KVSWAP_H_ */
