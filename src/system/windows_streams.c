/* windows_streams.c: streams.h on Windows. /dev/stdin and /dev/stdout name the standard streams, which have no path. */
#define _CRT_RAND_S /* rand_s */
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

#include <aclapi.h>
#include <errno.h>
#include <fcntl.h>
#include <io.h>
#include <stdlib.h>
#include <string.h>

#include "system/files.h"
#include "system/streams.h"
#include "system/windows.h"

enum { SHARE_ALL = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE };

static int refuse(int error) {
    errno = error;
    return 0;
}
static int refuse_as_windows(void) {
    windows_set_errno();
    return 0;
}

static int wide_of(const char *path, wchar_t wide[SYSTEM_OUTPUT_BYTES]) {
    return windows_wide(path, wide, SYSTEM_OUTPUT_BYTES) ||
           refuse(strlen(path) < SYSTEM_OUTPUT_BYTES ? ENOENT : ENAMETOOLONG);
}

/* ---- the process ---- */

static UINT code_page; /* of the terminal, before */
static void restore_terminal(void) { SetConsoleOutputCP(code_page); }
static BOOL WINAPI restore_and_go_on(DWORD event) {
    (void)event;
    restore_terminal();
    return FALSE; /* the process ends */
}

void system_start(void) {
    DWORD mode;
    for (int file = 0; file < 3; file++)
        _setmode(file, _O_BINARY);
    const HANDLE error = GetStdHandle(STD_ERROR_HANDLE), output = GetStdHandle(STD_OUTPUT_HANDLE);
    if (GetConsoleMode(error, &mode))
        SetConsoleMode(error, mode | ENABLE_VIRTUAL_TERMINAL_PROCESSING);
    else if (!GetConsoleMode(output, &mode))
        return;
    code_page = GetConsoleOutputCP();
    if (code_page && SetConsoleOutputCP(CP_UTF8)) {
        atexit(restore_terminal);
        SetConsoleCtrlHandler(restore_and_go_on, TRUE);
    }
}

int system_has_terminal(void) {
    DWORD mode;
    return GetConsoleMode(GetStdHandle(STD_ERROR_HANDLE), &mode) && mode & ENABLE_VIRTUAL_TERMINAL_PROCESSING;
}

/* ---- reading ---- */

int system_open_source(const char *path, struct system_source *source) {
    wchar_t wide[SYSTEM_OUTPUT_BYTES];
    BY_HANDLE_FILE_INFORMATION facts;
    if (strcmp(path, "/dev/stdin") == 0) {
        source->file = _dup(0);
    } else {
        if (!wide_of(path, wide))
            return 0;
        /* this flag opens folders too, whose kind is told then */
        const HANDLE file =
            CreateFileW(wide, GENERIC_READ, SHARE_ALL, NULL, OPEN_EXISTING, FILE_FLAG_BACKUP_SEMANTICS, NULL);
        if (file == INVALID_HANDLE_VALUE)
            return refuse_as_windows();
        source->file = _open_osfhandle((intptr_t)file, _O_RDONLY | _O_BINARY | _O_NOINHERIT);
        if (source->file < 0)
            CloseHandle(file);
    }
    if (source->file < 0)
        return 0;
    const HANDLE file = (HANDLE)_get_osfhandle(source->file);
    const DWORD type = GetFileType(file);
    const int known = type == FILE_TYPE_DISK && GetFileInformationByHandle(file, &facts) &&
                      !(facts.dwFileAttributes & FILE_ATTRIBUTE_DIRECTORY);
    source->kind = known ? SYSTEM_REGULAR : type == FILE_TYPE_PIPE ? SYSTEM_PIPE : SYSTEM_NEITHER;
    source->bytes = known ? (uint64_t)facts.nFileSizeHigh << 32 | facts.nFileSizeLow : 0;
    return 1;
}
void system_close_source(const struct system_source *source) { _close(source->file); }

/* A pipe that can be opened has its writer. */
void system_await_writer(const struct system_source *source, int milliseconds) { (void)source, (void)milliseconds; }

int64_t system_read(const struct system_source *source, void *data, size_t size) {
    enum { PART = 1 << 30 };
    size_t have = 0;
    while (have < size) {
        const int come = _read(source->file, (char *)data + have, size - have < PART ? (unsigned)(size - have) : PART);
        if (come < 0)
            return -1;
        if (come == 0)
            break;
        have += (size_t)come;
    }
    return (int64_t)have;
}

FILE *system_open_text(const char *path) {
    wchar_t wide[SYSTEM_OUTPUT_BYTES];
    return wide_of(path, wide) ? _wfopen(wide, L"rb") : NULL;
}

/* ---- writing ---- */

/* Whether the file is deleted when nobody has it open any more, however its process ends. Systems of files that cannot
 * do it keep a temporary file of a process that was killed. */
static void delete_at_end(HANDLE file, int deleted) {
    FILE_DISPOSITION_INFO wish = {deleted != 0};
    SetFileInformationByHandle(file, FileDispositionInfo, &wish, sizeof wish);
}

/* A file of a name that nobody can foretell, in the folder of what it is to replace. */
static HANDLE make_temporary(struct system_output *output) {
    wchar_t wide[SYSTEM_OUTPUT_BYTES];
    const char *name = system_last_name(output->path);
    for (int attempt = 0; attempt < 16; attempt++) {
        unsigned random[2];
        if (rand_s(&random[0]) || rand_s(&random[1]))
            break;
        const int length = snprintf(output->temporary, SYSTEM_OUTPUT_BYTES, "%.*s.fdm-%08x%08x",
                                    (int)(name - output->path), output->path, random[0], random[1]);
        if (length >= SYSTEM_OUTPUT_BYTES || !wide_of(output->temporary, wide)) {
            errno = ENAMETOOLONG;
            return INVALID_HANDLE_VALUE;
        }
        const HANDLE file = CreateFileW(wide, GENERIC_WRITE | DELETE | WRITE_DAC, FILE_SHARE_READ | FILE_SHARE_DELETE,
                                        NULL, CREATE_NEW, FILE_ATTRIBUTE_NORMAL, NULL);
        if (file != INVALID_HANDLE_VALUE) {
            delete_at_end(file, 1);
            return file;
        }
        if (GetLastError() != ERROR_FILE_EXISTS)
            break;
    }
    windows_set_errno();
    return INVALID_HANDLE_VALUE;
}

static void remove_temporary(const struct system_output *output) {
    wchar_t wide[SYSTEM_OUTPUT_BYTES];
    if (wide_of(output->temporary, wide))
        DeleteFileW(wide);
}

/* "\\.\NAME", which a look would open already. */
static int is_device(const wchar_t *wide) { return wcsncmp(wide, L"\\\\.\\", 4) == 0; }

/* The path behind links, of a file that is there. */
static int follow_links(HANDLE file, char path[SYSTEM_OUTPUT_BYTES]) {
    wchar_t wide[SYSTEM_OUTPUT_BYTES];
    const DWORD length = GetFinalPathNameByHandleW(file, wide, SYSTEM_OUTPUT_BYTES, FILE_NAME_NORMALIZED);
    if (!length)
        return refuse_as_windows();
    return (length < SYSTEM_OUTPUT_BYTES && windows_narrow(wide, path, SYSTEM_OUTPUT_BYTES)) || refuse(ENAMETOOLONG);
}

/* What is there must be open to writing. `attributes` are the name's own, of a link those of the link. */
static int look_at_existing(const wchar_t *wide, DWORD attributes, struct system_output *output) {
    if (attributes & FILE_ATTRIBUTE_READONLY)
        return refuse(EACCES);
    const HANDLE file = CreateFileW(wide, GENERIC_WRITE, SHARE_ALL, NULL, OPEN_EXISTING, 0, NULL);
    if (file == INVALID_HANDLE_VALUE)
        return refuse_as_windows();
    output->replaces = GetFileType(file) == FILE_TYPE_DISK;
    const int followed =
        !output->replaces || !(attributes & FILE_ATTRIBUTE_REPARSE_POINT) || follow_links(file, output->path);
    const int error = errno;
    CloseHandle(file);
    return followed || refuse(error);
}

int system_look_at_output(const char *path, struct system_output *output) {
    wchar_t wide[SYSTEM_OUTPUT_BYTES];
    const size_t length = strlen(path);
    output->replaces = output->exists = 0;
    if (!wide_of(path, wide))
        return 0;
    strcpy(output->path, path);
    if (strcmp(path, "/dev/stdout") == 0 || is_device(wide))
        return 1;
    const DWORD attributes = GetFileAttributesW(wide);
    output->exists = attributes != INVALID_FILE_ATTRIBUTES;
    if (!output->exists) {
        if (GetLastError() != ERROR_FILE_NOT_FOUND && GetLastError() != ERROR_PATH_NOT_FOUND)
            return refuse_as_windows();
        if (!length || wide[wcslen(wide) - 1] == L'\\')
            return refuse(length ? EISDIR : ENOENT);
        output->replaces = 1;
    } else if (attributes & FILE_ATTRIBUTE_DIRECTORY) {
        return refuse(EISDIR);
    } else if (!look_at_existing(wide, attributes, output)) {
        return 0;
    }
    if (!output->replaces)
        return 1;
    const HANDLE file = make_temporary(output);
    if (file == INVALID_HANDLE_VALUE)
        return 0;
    CloseHandle(file);
    remove_temporary(output);
    return 1;
}

FILE *system_begin_output(struct system_output *output) {
    wchar_t wide[SYSTEM_OUTPUT_BYTES];
    int number = -1;
    if (output->replaces) {
        const HANDLE file = make_temporary(output);
        if (file == INVALID_HANDLE_VALUE)
            return NULL;
        number = _open_osfhandle((intptr_t)file, _O_WRONLY | _O_BINARY | _O_NOINHERIT);
        if (number < 0)
            CloseHandle(file);
    } else if (strcmp(output->path, "/dev/stdout") == 0) {
        number = _dup(1);
    } else if (wide_of(output->path, wide)) {
        number = _wopen(wide, _O_WRONLY | _O_BINARY | _O_NOINHERIT);
    }
    FILE *stream = number >= 0 ? _fdopen(number, "wb") : NULL;
    if (!stream && number >= 0)
        _close(number);
    return stream;
}

/* The list of who may do what of the file that is replaced, as it is. */
static void keep_permissions(const wchar_t *old, HANDLE file) {
    PSECURITY_DESCRIPTOR descriptor;
    if (GetNamedSecurityInfoW(old, SE_FILE_OBJECT, DACL_SECURITY_INFORMATION, NULL, NULL, NULL, NULL, &descriptor) !=
        ERROR_SUCCESS)
        return;
    SetKernelObjectSecurity(file, DACL_SECURITY_INFORMATION, descriptor);
    LocalFree(descriptor);
}

int system_end_output(struct system_output *output, FILE *stream, int error) {
    wchar_t from[SYSTEM_OUTPUT_BYTES], to[SYSTEM_OUTPUT_BYTES];
    const HANDLE file = (HANDLE)_get_osfhandle(_fileno(stream));
    if (!output->replaces)
        return (fclose(stream) == 0 && !error) || refuse(error ? error : errno);
    const int named = wide_of(output->temporary, from) && wide_of(output->path, to);
    if (!error && (!named || !FlushFileBuffers(file))) {
        windows_set_errno();
        error = errno;
    }
    if (!error && output->exists)
        keep_permissions(to, file);
    if (!error)
        delete_at_end(file, 0);
    if (fclose(stream) != 0 && !error)
        error = errno;
    if (!error && !MoveFileExW(from, to, MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH)) {
        windows_set_errno();
        error = errno;
    }
    if (error)
        remove_temporary(output);
    return !error || refuse(error);
}
