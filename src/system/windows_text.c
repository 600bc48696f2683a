/* windows_text.c: text and errors between this library and Windows, and the variables of the environment. */
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "system/system.h"
#include "system/windows.h"

wchar_t *windows_wide(const char *text, wchar_t *wide, int size) {
    if (!MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, text, -1, wide, size))
        return NULL;
    for (wchar_t *at = wide; *at; at++)
        if (*at == L'/')
            *at = L'\\';
    return wide;
}

int windows_narrow(const wchar_t *wide, char *text, size_t size) {
    if (!WideCharToMultiByte(CP_UTF8, 0, wide, -1, text, (int)size, NULL, NULL))
        return 0;
    for (char *at = text; *at; at++)
        if (*at == '\\')
            *at = '/';
    return 1;
}

void windows_set_errno(void) {
    static const struct {
        DWORD windows;
        int here;
    } rows[] = {{ERROR_FILE_NOT_FOUND, ENOENT},      {ERROR_PATH_NOT_FOUND, ENOENT},
                {ERROR_INVALID_DRIVE, ENOENT},       {ERROR_BAD_NETPATH, ENOENT},
                {ERROR_BAD_NET_NAME, ENOENT},        {ERROR_INVALID_NAME, ENOENT},
                {ERROR_DIRECTORY, ENOTDIR},          {ERROR_ACCESS_DENIED, EACCES},
                {ERROR_WRITE_PROTECT, EACCES},       {ERROR_SHARING_VIOLATION, EBUSY},
                {ERROR_LOCK_VIOLATION, EBUSY},       {ERROR_PIPE_BUSY, EBUSY},
                {ERROR_FILE_EXISTS, EEXIST},         {ERROR_ALREADY_EXISTS, EEXIST},
                {ERROR_DISK_FULL, ENOSPC},           {ERROR_HANDLE_DISK_FULL, ENOSPC},
                {ERROR_NOT_ENOUGH_MEMORY, ENOMEM},   {ERROR_OUTOFMEMORY, ENOMEM},
                {ERROR_BROKEN_PIPE, EPIPE},          {ERROR_NO_DATA, EPIPE},
                {ERROR_FILE_TOO_LARGE, EFBIG},       {ERROR_FILENAME_EXCED_RANGE, ENAMETOOLONG},
                {ERROR_CANT_RESOLVE_FILENAME, ELOOP}};
    const DWORD error = GetLastError();
    errno = EIO;
    for (size_t n = 0; n < sizeof rows / sizeof rows[0]; n++)
        if (rows[n].windows == error)
            errno = rows[n].here;
}

/* ---- variables ---- */

struct kept {
    struct kept *next;
    char text[];
};

/* Who asks holds the text as long as what getenv() returns, so each that was ever found is kept, once. */
static const char *keep(const char *text) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static struct kept *all;
    pthread_mutex_lock(&lock);
    struct kept *found = all;
    while (found && strcmp(found->text, text) != 0)
        found = found->next;
    if (!found && (found = malloc(sizeof *found + strlen(text) + 1))) {
        strcpy(found->text, text);
        found->next = all;
        all = found;
    }
    pthread_mutex_unlock(&lock);
    return found ? found->text : NULL;
}

/* getenv() has it in the code page, where most letters of most names are missing. */
const char *system_variable(const char *name) {
    enum { WORDS = 32768 }; /* the longest that there is */
    wchar_t wide_name[128];
    const char *found = NULL;
    wchar_t *wide = malloc(WORDS * sizeof *wide);
    char *text = malloc(3 * WORDS);
    if (wide && text && MultiByteToWideChar(CP_UTF8, 0, name, -1, wide_name, 128) &&
        GetEnvironmentVariableW(wide_name, wide, WORDS) > 0 &&
        WideCharToMultiByte(CP_UTF8, 0, wide, -1, text, 3 * WORDS, NULL, NULL))
        found = keep(text);
    free(wide);
    free(text);
    return found;
}
