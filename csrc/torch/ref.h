/* Helpers that Python's limited API lacks: owned references, `with` statements, functions of later
 * versions. */
#ifndef FSDP_TORCH_REF_H
#define FSDP_TORCH_REF_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdio.h>
#include <string.h>

#if Py_LIMITED_API + 0 < 0x030C0000 /* CPython has both functions since 3.12 */
static inline PyObject *PyErr_GetRaisedException(void) {
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    if (!type)
        return NULL;
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback)
        PyException_SetTraceback(error, traceback);
    Py_DECREF(type);
    Py_XDECREF(traceback);
    return error;
}

static inline void PyErr_SetRaisedException(PyObject *error) {
    PyErr_Restore(error ? Py_NewRef((PyObject *)Py_TYPE(error)) : NULL, error,
                  error ? PyException_GetTraceback(error) : NULL);
}
#endif

#if Py_LIMITED_API + 0 < 0x030D0000 /* CPython has the function since 3.13 */
static inline int PyWeakref_GetRef(PyObject *reference, PyObject **object) {
    PyObject *borrowed = PyWeakref_GetObject(reference);
    *object = borrowed && borrowed != Py_None ? Py_NewRef(borrowed) : NULL;
    return borrowed ? *object != NULL : -1;
}
#endif

static inline void ref_release(PyObject **reference) {
    Py_XDECREF(*reference);
}

/* An owned local, or NULL, released at the end of its block, its only use at times. Return Py_NewRef() of it to
 * pass it on. */
#define OWNED __attribute__((cleanup(ref_release), unused)) PyObject

/* Set an exception (type, format, arguments) and evaluate to -1. */
#define RAISED(...) (PyErr_Format(__VA_ARGS__), -1)

/* Set *field to `value`, which is stolen and may be NULL. The old value is released after the store. */
static inline void ref_set(PyObject **field, PyObject *value) {
    PyObject *old = *field;
    *field = value;
    Py_XDECREF(old);
}

/* Discard the result of a call. Steals `result`, which is NULL with an exception. 0 or -1. */
static inline int ref_done(PyObject *result) {
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* Append `item`, which is stolen or NULL with an exception. 0 or -1. */
static inline int ref_append(PyObject *list, PyObject *item) {
    OWNED *owned = item;
    return item ? PyList_Append(list, owned) : -1;
}

/* Return the attribute of a module under a dotted path. New reference, or NULL with an exception. */
static inline PyObject *ref_find(const char *module, const char *path) {
    PyObject *found = PyImport_ImportModule(module);
    while (found && *path) {
        size_t length = strcspn(path, ".");
        OWNED *name = PyUnicode_FromStringAndSize(path, (Py_ssize_t)length);
        ref_set(&found, name ? PyObject_GetAttr(found, name) : NULL);
        path += length + (path[length] == '.');
    }
    return found;
}

/* Enter a context manager, which is stolen or NULL with an exception. Return it as a new reference, or NULL
 * with an exception. */
static inline PyObject *context_enter(PyObject *context) {
    if (ref_done(context ? PyObject_CallMethod(context, "__enter__", NULL) : NULL) < 0)
        Py_CLEAR(context);
    return context;
}

/* Exit the context manager that context_enter() returned, which is stolen. Keeps a set exception. 0 or -1. */
static inline int context_leave(PyObject *context) {
    PyObject *error = PyErr_GetRaisedException();
    int result = ref_done(PyObject_CallMethod(context, "__exit__", "OOO", Py_None, Py_None, Py_None));
    Py_DECREF(context);
    if (error)
        PyErr_SetRaisedException(error);
    return result;
}

/* Move the text of the current exception into `message`, and clear the exception. */
static inline void ref_take_exception(char *message, size_t nbytes) {
    OWNED *error = PyErr_GetRaisedException();
    OWNED *text = error ? PyObject_Str(error) : NULL;
    OWNED *bytes = text ? PyUnicode_AsUTF8String(text) : NULL;
    snprintf(message, nbytes, "%s", bytes ? PyBytes_AsString(bytes) : "unknown error");
    PyErr_Clear();
}

#endif
