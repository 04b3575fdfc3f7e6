/* What the limited API leaves out: of reference handling, and `with` as C has it. */
#ifndef FSDP_TORCH_REF_H
#define FSDP_TORCH_REF_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdio.h>
#include <string.h>

#if Py_LIMITED_API + 0 < 0x030C0000 /* in CPython since 3.12 */
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

#if Py_LIMITED_API + 0 < 0x030D0000 /* in CPython since 3.13 */
static inline int PyWeakref_GetRef(PyObject *reference, PyObject **object) {
    PyObject *borrowed = PyWeakref_GetObject(reference);
    *object = borrowed && borrowed != Py_None ? Py_NewRef(borrowed) : NULL;
    return borrowed ? *object != NULL : -1;
}
#endif

static inline void ref_release(PyObject **reference) {
    Py_XDECREF(*reference);
}

/* An owned local, or NULL: released where its block is left. What is handed on is a new reference to it. */
#define OWNED __attribute__((cleanup(ref_release))) PyObject

/* -1 with an exception: its type, and a format with what it takes. */
#define RAISED(...) (PyErr_Format(__VA_ARGS__), -1)

/* *field = value; the old value is released last, when the field is good again. Steals `value`, which may be
 * NULL. */
static inline void ref_set(PyObject **field, PyObject *value) {
    PyObject *old = *field;
    *field = value;
    Py_XDECREF(old);
}

/* Steals the result of a call that nobody wants, or NULL with an exception. 0 or -1 */
static inline int ref_done(PyObject *result) {
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* `item` is stolen, or NULL with an exception. 0 or -1 */
static inline int ref_append(PyObject *list, PyObject *item) {
    OWNED *owned = item;
    return item ? PyList_Append(list, owned) : -1;
}

/* What a module has under `path`, names with dots between them. New reference, or NULL with an exception. */
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

/* Steals a context manager, or NULL with an exception, and enters it. New reference to it, or NULL with an
 * exception. */
static inline PyObject *context_enter(PyObject *context) {
    if (ref_done(context ? PyObject_CallMethod(context, "__enter__", NULL) : NULL) < 0)
        Py_CLEAR(context);
    return context;
}

/* Steals what context_enter gave. 0 or -1; an exception that is set stays. */
static inline int context_leave(PyObject *context) {
    PyObject *error = PyErr_GetRaisedException();
    int result = ref_done(PyObject_CallMethod(context, "__exit__", "OOO", Py_None, Py_None, Py_None));
    Py_DECREF(context);
    if (error)
        PyErr_SetRaisedException(error);
    return result;
}

/* The current exception's text into `message`; the exception is cleared. */
static inline void ref_take_exception(char *message, size_t nbytes) {
    OWNED *error = PyErr_GetRaisedException();
    OWNED *text = error ? PyObject_Str(error) : NULL;
    OWNED *bytes = text ? PyUnicode_AsUTF8String(text) : NULL;
    snprintf(message, nbytes, "%s", bytes ? PyBytes_AsString(bytes) : "unknown error");
    PyErr_Clear();
}

#endif
