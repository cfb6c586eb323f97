#ifndef GPUTRACE_DEVICES_H
#define GPUTRACE_DEVICES_H

/* Writes the cards that the driver shows to this process; nothing where there is no driver. */
void tell_devices(void);

/* Writes the moment on three clocks. */
void tell_clocks(void);

#endif
