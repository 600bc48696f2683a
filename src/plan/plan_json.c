/* plan_json.c: a plan as one JSON object, and back. One table of fields serves both ways; the names of a kernel's
 * parameters are the kernel's (contract/family.h). */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/json_reader.h"
#include "base/kernel_name.h"
#include "base/struct_bytes.h"
#include "plan/plan.h"
#include "problem/problem_fields.h"

struct field {
    const char *name;
    enum field_kind kind;
    size_t offset, size;
    int32_t absent; /* int fields: this value is written as null; INT32_MIN = never */
};

#define OF(member, kind, absent) \
    { #member, kind, offsetof(fdm_plan, member), sizeof(((fdm_plan *)0)->member), absent }
#define OF_PROBLEM(field, kind, value, rule) \
    , { #field, kind, offsetof(fdm_plan, problem.field), sizeof(((fdm_problem *)0)->field), INT32_MIN }

static const struct field plan_fields[] = {
    OF(family, FIELD_TEXT, 0),
    OF(kernel, FIELD_TEXT, 0),
    OF(choice, FIELD_TEXT, 0),
    OF(block_m, FIELD_INT32, 0),
    OF(block_n, FIELD_INT32, 0),
    OF(stages, FIELD_INT32, 0),
    OF(v_in_registers, FIELD_INT32, -1),
    OF(shared_bytes, FIELD_INT64, -1),
    OF(workspace_bytes, FIELD_INT64, INT32_MIN),
    OF(num_threads, FIELD_INT32, INT32_MIN),
    OF(kernel_index, FIELD_INT32, INT32_MIN),
    OF(device.type, FIELD_INT32, INT32_MIN),
    OF(device.index, FIELD_INT32, INT32_MIN),
    OF(parameters, FIELD_PARAMETERS, 0),
    OF(reason, FIELD_TEXT, 0) FDM_PROBLEM_FIELDS(OF_PROBLEM, OF_PROBLEM),
};
enum { NUM_FIELDS = sizeof plan_fields / sizeof plan_fields[0] };

/* ---- writing ---- */

struct text {
    char *buffer;
    size_t size, used; /* used counts what would be written, without the final 0 */
};

static void append(struct text *t, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    size_t left = t->used < t->size ? t->size - t->used : 0;
    int length = vsnprintf(left ? t->buffer + t->used : NULL, left, format, arguments);
    va_end(arguments);
    t->used += (size_t)(length > 0 ? length : 0);
}

static void append_string(struct text *t, const char *string) {
    append(t, "\"");
    for (; *string; string++)
        if (*string == '"' || *string == '\\')
            append(t, "\\%c", *string);
        else if ((unsigned char)*string < 0x20)
            append(t, "\\u%04x", *string);
        else
            append(t, "%c", *string);
    append(t, "\"");
}

static void append_integer(struct text *t, int64_t value, int32_t absent) {
    if (absent != INT32_MIN && value == absent)
        append(t, "null");
    else
        append(t, "%lld", (long long)value);
}

static void append_array(struct text *t, const int64_t *values, int32_t count) {
    for (int32_t i = 0; i < count; i++)
        append(t, "%s%lld", i ? ", " : "[", (long long)values[i]);
    append(t, "]");
}

/* The names of a plan's parameters, ended by NULL; NULL where this library does not have the plan's kernel. */
static const char *const *parameter_names(const fdm_plan *plan) {
    static const char *const none[] = {NULL};
    const struct family *family = plan_family(plan);
    if (!family || !plan_names_row(plan, family))
        return NULL;
    return family->parameters ? family->parameters(family, plan->kernel_index) : none;
}

/* {"NAME": value, ...}; of a kernel that is not known, all values without names. */
static void append_parameters(struct text *t, const fdm_plan *plan) {
    const char *const *names = parameter_names(plan);
    int64_t values[FDM_PLAN_PARAMETERS];
    for (int32_t i = 0; i < FDM_PLAN_PARAMETERS; i++)
        values[i] = plan->parameters[i];
    if (!names) {
        append_array(t, values, FDM_PLAN_PARAMETERS);
        return;
    }
    append(t, "{");
    for (int32_t i = 0; names[i]; i++)
        append(t, "%s\"%s\": %lld", i ? ", " : "", names[i], (long long)values[i]);
    append(t, "}");
}

static void append_value(struct text *t, const struct field *field, const fdm_plan *plan) {
    const void *value = (const char *)plan + field->offset;
    switch (field->kind) {
    case FIELD_INT8: append_integer(t, *(const int8_t *)value, field->absent); break;
    case FIELD_INT32: append_integer(t, *(const int32_t *)value, field->absent); break;
    case FIELD_INT64: append_integer(t, *(const int64_t *)value, field->absent); break;
    case FIELD_DOUBLE: append(t, "%.17g", *(const double *)value); break;
    case FIELD_TEXT: append_string(t, value); break;
    case FIELD_DTYPE: append(t, "\"%s\"", fdm_dtype_name(*(const fdm_dtype *)value)); break;
    case FIELD_PASS: append(t, "\"%s\"", *(const fdm_pass *)value == FDM_BACKWARD ? "backward" : "forward"); break;
    case FIELD_SHAPE: append_array(t, value, 4); break;
    case FIELD_PARAMETERS: append_parameters(t, plan); break;
    }
}

fdm_status fdm_plan_to_json(const fdm_plan *plan, char *buffer, size_t size, size_t *needed) {
    fdm_plan room;
    if (!buffer && size > 0)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "buffer is NULL");
    if (!(plan = plan_read(plan, &room)))
        return FDM_ERROR_INVALID_ARGUMENT;
    struct text t = {buffer, size, 0};
    for (size_t i = 0; i < NUM_FIELDS; i++) {
        append(&t, "%s\"%s\": ", i ? ", " : "{", plan_fields[i].name);
        append_value(&t, &plan_fields[i], plan);
    }
    append(&t, "}");
    if (needed)
        *needed = t.used + 1;
    if (size > 0 && t.used >= size)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "buffer has %zu bytes; the plan's JSON needs %zu", size,
                         t.used + 1);
    return FDM_OK;
}

/* ---- reading ---- */

static int read_integer(struct json_reader *r, const struct field *field, int64_t least, int64_t most, int64_t *value) {
    if (field->absent != INT32_MIN && json_null(r)) {
        *value = field->absent;
        return 1;
    }
    if (!json_integer(r, value))
        return 0;
    if (*value < least || *value > most)
        r->fault = "an integer is out of range";
    return !r->fault;
}

/* An array of at least `least` and at most `most` integers; the rest of `values` stays. */
static int read_array(struct json_reader *r, int64_t *values, int least, int most) {
    int first = 1, count = 0;
    json_array_begin(r);
    while (json_array_next(r, &first))
        if (count == most)
            r->fault = "an array is too long";
        else if (json_integer(r, &values[count]))
            count++;
    if (!r->fault && count < least)
        r->fault = "an array is too short";
    return !r->fault;
}

/* A plan's parameters as they stand in its JSON: the kernel that gives the names their places may follow. */
struct parameters {
    int32_t named, count;
    char names[FDM_PLAN_PARAMETERS][32];
    int64_t values[FDM_PLAN_PARAMETERS];
};
enum { OLD_PLAN_PARAMETERS = 8 }; /* plans once had this number, without names */

static int read_parameters(struct json_reader *r, struct parameters *p) {
    char name[sizeof p->names[0]];
    int first = 1;
    p->named = json_at_object(r);
    if (!p->named)
        return read_array(r, p->values, OLD_PLAN_PARAMETERS, FDM_PLAN_PARAMETERS);
    json_object_begin(r);
    while (json_object_next(r, &first, name, sizeof name))
        if (p->count == FDM_PLAN_PARAMETERS)
            r->fault = "there are too many parameters";
        else if (json_integer(r, &p->values[p->count]))
            memcpy(p->names[p->count++], name, sizeof name);
    return !r->fault;
}

/* The value of a name; without names, the one at the place. NULL: there is none. */
static const int64_t *find_parameter(const struct parameters *p, const char *name, int32_t place) {
    if (!p->named)
        return &p->values[place];
    for (int32_t i = 0; i < p->count; i++)
        if (strcmp(p->names[i], name) == 0)
            return &p->values[i];
    return NULL;
}

/* Each of the kernel's names once, and no other. */
static fdm_status place_parameters(const struct parameters *p, fdm_plan *plan) {
    const char *const *names = parameter_names(plan);
    int32_t count = 0;
    if (p->named && !names)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "the plan's JSON names parameters of '%s', which is not kernel %d of family '%s' here",
                         plan->kernel, plan->kernel_index, plan->family);
    for (; names ? names[count] != NULL : count < FDM_PLAN_PARAMETERS; count++) {
        const int64_t *value = find_parameter(p, names ? names[count] : "", count);
        if (!value || *value < INT32_MIN || *value > INT32_MAX)
            return error_set(FDM_ERROR_INVALID_ARGUMENT, "the plan's JSON %s the parameter '%s'",
                             value ? "gives no 32-bit integer for" : "lacks", names ? names[count] : "");
        plan->parameters[count] = (int32_t)*value;
    }
    return !p->named || count == p->count
               ? FDM_OK
               : error_set(FDM_ERROR_INVALID_ARGUMENT,
                           "the plan's JSON has a parameter twice, or one that '%s' does not have", plan->kernel);
}

static int read_name(struct json_reader *r, const struct field *field, void *value) {
    char name[16];
    if (!json_string(r, name, sizeof name))
        return 0;
    if (field->kind == FIELD_DTYPE) {
        *(fdm_dtype *)value = fdm_dtype_from_name(name);
        if (*(fdm_dtype *)value == FDM_NO_DTYPE)
            r->fault = "a dtype is unknown";
    } else if (strcmp(name, "forward") == 0 || strcmp(name, "backward") == 0) {
        *(fdm_pass *)value = name[0] == 'b' ? FDM_BACKWARD : FDM_FORWARD;
    } else {
        r->fault = "a pass is neither forward nor backward";
    }
    return !r->fault;
}

static int read_value(struct json_reader *r, const struct field *field, void *value, struct parameters *parameters) {
    int64_t number = 0;
    switch (field->kind) {
    case FIELD_INT8:
        if (!read_integer(r, field, INT8_MIN, INT8_MAX, &number))
            return 0;
        *(int8_t *)value = (int8_t)number;
        return 1;
    case FIELD_INT32:
        if (!read_integer(r, field, INT32_MIN, INT32_MAX, &number))
            return 0;
        *(int32_t *)value = (int32_t)number;
        return 1;
    case FIELD_INT64: return read_integer(r, field, INT64_MIN, INT64_MAX, value);
    case FIELD_DOUBLE: return json_number(r, value);
    case FIELD_TEXT: return json_string(r, value, field->size);
    case FIELD_DTYPE:
    case FIELD_PASS: return read_name(r, field, value);
    case FIELD_SHAPE: return read_array(r, value, 4, 4);
    case FIELD_PARAMETERS: return read_parameters(r, parameters);
    }
    return 0;
}

static int find_field(const char *name) {
    for (int i = 0; i < NUM_FIELDS; i++)
        if (strcmp(plan_fields[i].name, name) == 0)
            return i;
    return -1;
}

fdm_status fdm_plan_from_json(const char *json, size_t length, fdm_plan *plan) {
    if (!json)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "json is NULL");
    fdm_plan read;
    struct parameters parameters = {0};
    memset(&read, 0, sizeof read);
    read.struct_bytes = sizeof read;
    struct json_reader r = json_reader_of(json, length);
    char key[32] = "";
    char seen[NUM_FIELDS] = {0};
    int first = 1;
    json_object_begin(&r);
    while (!r.fault && json_object_next(&r, &first, key, sizeof key)) {
        int index = find_field(key);
        if (index < 0)
            return error_set(FDM_ERROR_INVALID_ARGUMENT, "the plan's JSON has an unknown key '%s'", key);
        if (seen[index]++)
            return error_set(FDM_ERROR_INVALID_ARGUMENT, "the plan's JSON has the key '%s' twice", key);
        read_value(&r, &plan_fields[index], (char *)&read + plan_fields[index].offset, &parameters);
    }
    if (!r.fault)
        json_end(&r);
    if (r.fault)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "the plan's JSON is damaged near key '%s': %s", key, r.fault);
    for (int i = 0; i < NUM_FIELDS; i++)
        if (!seen[i])
            return error_set(FDM_ERROR_INVALID_ARGUMENT, "the plan's JSON lacks the key '%s'", plan_fields[i].name);
    const char *kernel = kernel_current_name(read.kernel);
    if (kernel != read.kernel)
        snprintf(read.kernel, sizeof read.kernel, "%s", kernel);
    fdm_status status = fdm_problem_validate(&read.problem);
    if (!status)
        status = place_parameters(&parameters, &read);
    if (!status && read.workspace_bytes < 0)
        status = error_set(FDM_ERROR_INVALID_ARGUMENT, "the plan's JSON has workspace_bytes %lld",
                           (long long)read.workspace_bytes);
    return status ? status : STRUCT_WRITE(fdm_plan, plan, &read);
}
