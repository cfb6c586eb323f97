/* NVTX ranges of the program and of NCCL: the functions that an NVTX client calls once this library is named by
 * NVTX_INJECTION64_PATH. A range costs the program a read of the clock and an entry on its thread's stack.
 * Ranges of NCCL and RCCL carry a payload each, of which the communicator, the size of the message and the peer
 * are kept. */
#pragma once

#include <stdint.h>

/* Gives tables of the client by their ids. */
typedef const void *(*nvtx_export_t)(uint32_t id);
typedef struct nvtx_module nvtx_module_t;

/* Puts our functions into a client's tables; 1, or 0 where it has none. */
int nvtx_install(nvtx_export_t export_table);

/* Puts our functions into the table of the payload extension; 1, or 0 where it is another one. */
int nvtx_install_payloads(nvtx_module_t *module);

/* In a forked child, whose parent's threads may have held the lock. */
void nvtx_reset_in_child(void);
