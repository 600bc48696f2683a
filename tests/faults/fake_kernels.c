/* fake_kernels.c: modules, functions and launches of the pretended driver. */
#include <stdlib.h>

#include "fake_state.h"

static cu_result module_load(cu_module *module, const void *image) {
    cu_result result = fake_begin("cuModuleLoadData", CONTEXT);
    const int fake = image && memcmp(image, "fake cubin\n", 11) == 0;
    if (!result && !fake && (!image || memcmp(image, "\177ELF", 4) != 0))
        result = INVALID_IMAGE;
    if (!result) {
        cu_module made = calloc(1, sizeof *made);
        made->next = fake_state.modules;
        fake_state.modules = made;
        made->device = fake_current();
        made->text = fake ? strdup(image) : NULL;
        *module = made;
        fake_state.live.modules++;
        if (fake_hooks && !fake)
            result = fake_hooks->load(made, image);
    }
    return fake_end(result);
}

static cu_result module_unload(cu_module module) {
    cu_result result = fake_begin("cuModuleUnload", CONTEXT);
    if (!result) {
        free(module->text);
        module->text = NULL;
        fake_state.live.modules--;
    }
    return fake_end(result);
}

static cu_result module_function(cu_function *function, cu_module module, const char *name) {
    cu_result result = fake_begin("cuModuleGetFunction", CONTEXT);
    if (!result && (module->device != fake_current() || module->num_functions == FUNCTIONS_MAX))
        result = INVALID_HANDLE;
    if (!result && module->text && !strstr(module->text, name))
        result = NOT_FOUND;
    if (!result) {
        *function = &module->functions[module->num_functions++];
        (*function)->device = module->device;
        (*function)->module = module;
        (*function)->max_shared_bytes = 48 << 10;
        (*function)->max_cluster = 8;
        snprintf((*function)->entry, NAME_BYTES, "%s", name);
        if (fake_hooks && module->executable)
            result = fake_hooks->function(*function, name);
    }
    return fake_end(result);
}

static cu_result function_set(cu_function function, int attribute, int value) {
    cu_result result = fake_begin("cuFuncSetAttribute", CONTEXT);
    const int limit = attribute == CU_FUNCTION_MAX_DYNAMIC_SHARED_BYTES ? function->device->shared_bytes
                      : attribute == CU_FUNCTION_SHARED_CARVEOUT        ? 100
                      : attribute == CU_FUNCTION_NON_PORTABLE_CLUSTER   ? 1
                                                                        : -1;
    if (!result && (value < 0 || value > limit))
        result = INVALID_VALUE;
    if (!result && attribute == CU_FUNCTION_MAX_DYNAMIC_SHARED_BYTES)
        function->max_shared_bytes = value;
    if (!result && attribute == CU_FUNCTION_NON_PORTABLE_CLUSTER)
        function->max_cluster = value ? 16 : 8;
    return fake_end(result);
}

static cu_result function_get(int *value, int attribute, cu_function function) {
    cu_result result = fake_begin("cuFuncGetAttribute", CONTEXT);
    if (!result)
        *value = attribute == CU_FUNCTION_MAX_THREADS                ? 1024
                 : attribute == CU_FUNCTION_MAX_DYNAMIC_SHARED_BYTES ? function->max_shared_bytes
                                                                     : 0;
    return fake_end(result);
}

/* The launch as it is written down; 0 when the device would not take it. */
static int read_launch(const struct cu_launch_config *config, cu_function function, void **arguments,
                       struct fake_launch *launch) {
    *launch = (struct fake_launch){.device = (int)(function->device - fake_state.devices),
                                   .max_shared_bytes = function->max_shared_bytes,
                                   .shared_bytes = config->shared_bytes,
                                   .stream = config->stream};
    memcpy(launch->entry, function->entry, sizeof launch->entry);
    memcpy(launch->grid, config->grid, sizeof launch->grid);
    memcpy(launch->block, config->block, sizeof launch->block);
    memcpy(&launch->first_member, arguments[0], sizeof launch->first_member);
    for (unsigned i = 0; i < config->num_attributes; i++) {
        const struct cu_launch_attribute *a = &config->attributes[i];
        if (a->id == CU_LAUNCH_CLUSTER_DIMENSION && a->value.cluster.y == 1 && a->value.cluster.z == 1)
            launch->cluster = a->value.cluster.x;
        else if (a->id == CU_LAUNCH_PROGRAMMATIC_SERIALIZATION)
            launch->programmatic = a->value.programmatic_serialization;
        else if (a->id == CU_LAUNCH_COOPERATIVE)
            launch->cooperative = a->value.cooperative;
        else
            return 0;
    }
    if ((launch->cluster || launch->programmatic) && function->device->major < 9)
        return 0;
    if (launch->cluster && ((int)launch->cluster > function->max_cluster || launch->grid[0] % launch->cluster))
        return 0;
    for (int i = 0; i < 3; i++)
        if (launch->grid[i] < 1 || launch->block[i] < 1 || (i > 0 && launch->grid[i] > 65535))
            return 0;
    return launch->block[0] * launch->block[1] * launch->block[2] <= 1024 &&
           launch->shared_bytes <= (unsigned)function->max_shared_bytes;
}

static cu_result launch_kernel(const struct cu_launch_config *config, cu_function function, void **arguments,
                               void **extra) {
    cu_result result = fake_begin("cuLaunchKernelEx", CONTEXT);
    struct fake_launch launch;
    if (!result && (!function || function->device != fake_current() || (void *)config->stream == &fake_state.foreign))
        result = INVALID_HANDLE;
    if (!result && (extra || !read_launch(config, function, arguments, &launch)))
        result = INVALID_VALUE;
    if (!result) {
        if (fake_state.num_launches == fake_state.max_launches) {
            fake_state.max_launches = 2 * fake_state.max_launches + 64;
            fake_state.launches =
                realloc(fake_state.launches, (size_t)fake_state.max_launches * sizeof *fake_state.launches);
        }
        fake_state.launches[fake_state.num_launches++] = launch;
        struct fake_order order = {.kind = FAKE_LAUNCHED, .stream = launch.stream};
        memcpy(order.entry, launch.entry, sizeof order.entry);
        fake_note(&order);
    }
    if (!result && fake_state.planted && !(result = fake_finish(function->device)))
        fake_state.planted_seconds += fake_state.planted(&launch, arguments[0]);
    if (!result && fake_hooks &&
        function->kernel) { /* copies come first; a programmatic launch overlaps launches alone */
        if (!launch.programmatic || function->device->num_pending)
            result = fake_finish(function->device);
        if (!result)
            result = fake_hooks->launch(&launch, function, arguments);
    }
    return fake_end(result);
}

void fake_fill_kernels(struct cuda_driver *driver) {
    driver->module_load = module_load;
    driver->module_unload = module_unload;
    driver->module_function = module_function;
    driver->function_set = function_set;
    driver->function_get = function_get;
    driver->launch = launch_kernel;
}
