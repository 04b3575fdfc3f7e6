/* DistributedDataParallel around the root. It averages the gradients of flat parameters that are whole on
 * each rank, by hooks that come after the anchor's. What it cannot average is said when the root's forward
 * begins. */
#include "handle/unit_error.h"
#include "runtime/runtime.h"
#include "torch/names.h"

/* Are the unit's parameters among those that it looks after, and trained? 1, 0 or -1. */
static int is_among(const struct flat_param *param, PyObject *managed) {
    PyObject *own = param->use_orig_params ? PyList_GetItem(param->params, 0) : param->tensor;
    for (Py_ssize_t i = 0; i < PyList_Size(managed); i++)
        if (PyList_GetItem(managed, i) == own)
            return flat_param_is_trainable(param);
    return 0;
}

/* torch trains on (parity 48). */
static int warn(const struct flat_param *param) {
    return PyErr_WarnFormat(
        PyExc_UserWarning, 1,
        "rank %lld, unit %S: DistributedDataParallel never averages its gradients, as autograd does "
        "not reach %s: replicas drift apart. Use HYBRID_SHARD in place of DistributedDataParallel, "
        "or a group of one rank, use_orig_params=False and full precision",
        (long long)param->layout.rank, param->name,
        param->use_orig_params ? "original parameters" : "flat parameters of low precision");
}

static int refuse(const struct flat_param *param) {
    return unit_error(PyExc_RuntimeError, param->layout.rank, param->name,
                      "DistributedDataParallel cannot average the gradient of its flat parameter, which "
                      "is %s: use HYBRID_SHARD in place of DistributedDataParallel, or NO_SHARD without CPU "
                      "offload",
                      param->sharded ? "sharded, each rank's being of another part" : "offloaded");
}

static int check_part(const struct unit *part, PyObject *managed) {
    const struct flat_param *param = &part->handle->param;
    bool whole = !param->sharded && !part->handle->storage.offload;
    bool reached = !param->use_orig_params && !part->handle->storage.copies[PRECISION_COMPUTE].low_precision;
    int among = whole && reached ? 0 : is_among(param, managed);
    if (among <= 0)
        return among;
    return param->use_orig_params || whole ? warn(param) : refuse(param);
}

int runtime_note_ddp(struct runtime *runtime) {
    PyObject *ddp = torch_active_ddp();
    int result = 0;
    if (ddp != Py_None && runtime->ddp != ddp) {
        OWNED *managed = PyObject_GetAttr(ddp, torch_names._module_parameters);
        if (!managed)
            PyErr_Clear();
        bool is_list = managed && PyList_Check(managed);
        for (int64_t i = 0; is_list && !result && i < runtime->num_units; i++)
            result = runtime->units[i]->handle ? check_part(runtime->units[i], managed) : 0;
    }
    runtime->ddp = result < 0 || ddp == Py_None ? NULL : ddp;
    Py_XDECREF(ddp);
    if (result < 0 || runtime->has_edges)
        return result;
    /* From the first forward on in which somebody may look for flat parameters: see [Note: flat parameters in
     * the graph] in backward.c. */
    OWNED *name = PyUnicode_FromString("torch.distributed.pipelining");
    PyObject *module = name ? PyDict_GetItemWithError(PyImport_GetModuleDict(), name) : NULL;
    runtime->has_edges = module || runtime->ddp;
    return PyErr_Occurred() ? -1 : 0;
}
