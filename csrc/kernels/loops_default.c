/* The loops for any processor of the architecture. */
#include "kernels/loops_versions.h"

#define LOOPS_TABLE loops_default
#define LOOPS_NAME  "default"
#include "kernels/loops_body.h"
