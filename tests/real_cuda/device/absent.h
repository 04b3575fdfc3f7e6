/* Functions that torch's libraries link with or look up, and that the fake GPU does not have. */
#pragma once

enum { INVALID_USAGE = 5 /* of NCCL */, NOT_SUPPORTED = 801 /* of the driver and of the runtime */ };

#define ABSENT(name, error)                                                                                  \
    extern "C" __attribute__((visibility("default"))) int name() {                                           \
        return error;                                                                                        \
    }
