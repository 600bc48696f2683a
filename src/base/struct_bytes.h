/* struct_bytes.h: structs of callers whose header is older or newer than the library (docs/decisions/014). */
#ifndef FDM_STRUCT_BYTES_H
#define FDM_STRUCT_BYTES_H

#include <string.h>

#include "flash_dmattn.h"

/* A struct that begins with struct_bytes, whole: `given` itself, or `*room` with 0 in the fields that an older caller
 * lacks. NULL with a sentence: `given` is NULL, struct_bytes is no size, or a field that the library lacks is not 0. */
#define STRUCT_READ(type, given, room) ((const type *)struct_read(given, room, sizeof(type), #given, #type))
const void *struct_read(const void *given, void *room, size_t bytes, const char *name, const char *type);

/* Whether `given` can be written. */
#define STRUCT_CHECK(type, given) struct_check(given, #given, #type)
fdm_status struct_check(const void *given, const char *name, const char *type);

/* Copies the fields that the caller has, and 0 to those that the library lacks. struct_bytes stays the caller's. */
#define STRUCT_WRITE(type, given, whole) struct_write(given, whole, sizeof(type), #given, #type)
fdm_status struct_write(void *given, const void *whole, size_t bytes, const char *name, const char *type);

/* The end of a sentence about a field that the library lacks, in a struct's later bytes or its reserved words. */
#define FDM_NEWER_FIELD "a newer version than " FDM_VERSION " has the field"
static inline int struct_is_zero(const void *bytes, size_t size) {
    const char *at = bytes;
    return size == 0 || (*at == 0 && memcmp(at, at + 1, size - 1) == 0); /* each byte is the one before it */
}

#endif
