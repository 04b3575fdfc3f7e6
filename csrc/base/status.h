/* The results of functions below the Python layers, where no exception exists. */
#ifndef FSDP_BASE_STATUS_H
#define FSDP_BASE_STATUS_H

enum status {
    STATUS_OK = 0,
    STATUS_NO_MEMORY,
    STATUS_INVALID,     /* an argument is out of its domain: a bug of the caller */
    STATUS_UNSUPPORTED, /* a dtype pair without a kernel */
    STATUS_DEVICE,      /* the GPU's runtime refused a launch */
};

#endif
