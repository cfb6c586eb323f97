/* The GPUs that the driver shows to this process. */
#pragma once

/* Writes a row for each; none where there is no driver. */
void devices_write(void);
