/* native_xla.h: the part of XLA's foreign function interface that native_xla.c speaks: the layout of its structs in
 * memory, version 0.1 and later, as xla/ffi/api/c_api.h of jaxlib 0.10.2 has it. Every struct begins with its size. */
#ifndef FLASH_DMATTN_NATIVE_XLA_H
#define FLASH_DMATTN_NATIVE_XLA_H

#include <stddef.h>
#include <stdint.h>

struct xla_head { /* of all structs but spans and scalars */
    size_t struct_size;
    struct xla_extension *extension;
};
enum { XLA_EXTENSION_METADATA = 1 };
struct xla_extension {
    size_t struct_size;
    int32_t type;
    struct xla_extension *next;
};
struct xla_version {
    struct xla_head head;
    int32_t major, minor;
};
struct xla_metadata {
    size_t struct_size;
    struct xla_version version;
    uint32_t traits;
    int64_t state_type; /* from 0.2 on */
};
struct xla_metadata_extension {
    struct xla_extension base;
    struct xla_metadata *metadata;
};

enum xla_dtype {
    XLA_BOOL = 1,
    XLA_INT32 = 4,
    XLA_INT64 = 5,
    XLA_FLOAT16 = 10,
    XLA_FLOAT32 = 11,
    XLA_FLOAT64 = 12,
    XLA_BFLOAT16 = 16
};
struct xla_buffer { /* rows are contiguous, the last axis innermost */
    struct xla_head head;
    int32_t dtype;
    void *data;
    int64_t rank, *dims;
};
struct xla_array {
    int32_t dtype;
    size_t size;
    void *data;
};
struct xla_span {
    const char *text;
    size_t length;
};

struct xla_list { /* arguments, results */
    struct xla_head head;
    int64_t size;
    int32_t *types;
    struct xla_buffer **items;
};
struct xla_attributes {
    struct xla_head head;
    int64_t size;
    int32_t *types;
    struct xla_span **names;
    void **values;
};
enum { XLA_ATTRIBUTE_ARRAY = 1 };

struct xla_error_create {
    struct xla_head head;
    const char *message;
    int32_t code;
};
enum { XLA_INVALID_ARGUMENT = 3, XLA_RESOURCE_EXHAUSTED = 8, XLA_UNIMPLEMENTED = 12, XLA_INTERNAL = 13 };
struct xla_stream_get {
    struct xla_head head;
    void *context, *stream;
};
struct xla_memory {
    struct xla_head head;
    void *context;
    size_t size, alignment;
    void *data;
};
struct xla_memory_free {
    struct xla_head head;
    void *context;
    size_t size;
    void *data;
};

struct xla_device_get {
    struct xla_head head;
    void *context;
    int32_t ordinal;
};

struct xla_api {
    struct xla_head head;
    struct xla_version version;
    const void *internal;
    void *(*error_create)(struct xla_error_create *);
    void *error_message, *error_destroy, *handler_register;
    void *(*stream_get)(struct xla_stream_get *);
    void *type_register, *context_get, *state_set, *state_get;
    void *(*memory_allocate)(struct xla_memory *);
    void *(*memory_free)(struct xla_memory_free *);
    void *pool_schedule, *pool_threads, *future_create, *future_available, *future_error, *run_id;
    void *(*device_get)(struct xla_device_get *);
};

enum { XLA_EXECUTE = 3 };
struct xla_call {
    struct xla_head head;
    const struct xla_api *api;
    void *context;
    int32_t stage;
    struct xla_list arguments, results;
    struct xla_attributes attributes;
};

#endif
