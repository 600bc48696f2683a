/* windows_files.c: files.h on Windows. Names in a folder go by its path. */
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

#include <aclapi.h>
#include <errno.h>
#include <fcntl.h>
#include <io.h>
#include <sddl.h>
#include <stdlib.h>
#include <string.h>

#include "system/files.h"
#include "system/windows.h"

const char system_cache_variable[] = "LOCALAPPDATA", system_cache_below[] = "/flash_dmattn/cache";

enum { WHOLE_BYTES = SYSTEM_PATH_BYTES + SYSTEM_NAME_BYTES + 16 };

static wchar_t *wide_path(const struct system_folder *folder, const char *name, wchar_t wide[WHOLE_BYTES]) {
    char path[WHOLE_BYTES];
    snprintf(path, sizeof path, "%s/%s", folder->path, name);
    return windows_wide(path, wide, WHOLE_BYTES);
}

/* ---- whose it is ---- */

/* The user, the administrators, the system, or the owner whoever that is. */
static int is_trusted(PSID sid, PSID user) {
    static const WELL_KNOWN_SID_TYPE known[] = {WinBuiltinAdministratorsSid, WinLocalSystemSid, WinCreatorOwnerSid,
                                                WinCreatorOwnerRightsSid};
    for (size_t n = 0; n < sizeof known / sizeof known[0]; n++)
        if (IsWellKnownSid(sid, known[n]))
            return 1;
    return EqualSid(sid, user) != 0;
}

static int others_may_write(PACL list, PSID user) {
    const DWORD writes = FILE_WRITE_DATA | FILE_APPEND_DATA | FILE_DELETE_CHILD | DELETE | WRITE_DAC | WRITE_OWNER |
                         GENERIC_WRITE | GENERIC_ALL;
    ACCESS_ALLOWED_ACE *entry;
    if (!list) /* everybody may do everything */
        return 1;
    for (DWORD n = 0; n < list->AceCount; n++)
        if (GetAce(list, n, (void **)&entry) && entry->Header.AceType == ACCESS_ALLOWED_ACE_TYPE &&
            (entry->Mask & writes) && !is_trusted(&entry->SidStart, user))
            return 1;
    return 0;
}

static const char *foreign_to(HANDLE file) {
    union {
        TOKEN_USER user;
        char bytes[256];
    } token;
    PSID owner;
    PACL list;
    PSECURITY_DESCRIPTOR descriptor;
    HANDLE process;
    DWORD size;
    if (!OpenProcessToken(GetCurrentProcess(), TOKEN_QUERY, &process))
        return "has an owner that cannot be told from others";
    const int known = GetTokenInformation(process, TokenUser, &token, sizeof token, &size) != 0;
    CloseHandle(process);
    if (!known || GetSecurityInfo(file, SE_FILE_OBJECT, OWNER_SECURITY_INFORMATION | DACL_SECURITY_INFORMATION, &owner,
                                  NULL, &list, NULL, &descriptor) != ERROR_SUCCESS)
        return "has an owner that cannot be told from others";
    const char *why = NULL;
    if (!is_trusted(owner, token.user.User.Sid))
        why = "belongs to another user";
    else if (others_may_write(list, token.user.User.Sid))
        why = "may be written by others than its owner";
    LocalFree(descriptor);
    return why;
}

static int read_facts(HANDLE file, struct system_file_facts *facts) {
    BY_HANDLE_FILE_INFORMATION told;
    if (!GetFileInformationByHandle(file, &told))
        return 0;
    const DWORD odd = FILE_ATTRIBUTE_DIRECTORY | FILE_ATTRIBUTE_REPARSE_POINT | FILE_ATTRIBUTE_DEVICE;
    const FILETIME changed = told.ftLastWriteTime;
    const int64_t since_1601 = (int64_t)changed.dwHighDateTime << 32 | changed.dwLowDateTime;
    const int regular = GetFileType(file) == FILE_TYPE_DISK && !(told.dwFileAttributes & odd);
    *facts = (struct system_file_facts){.bytes = (int64_t)told.nFileSizeHigh << 32 | told.nFileSizeLow,
                                        .changed = (since_1601 - INT64_C(116444736000000000)) * 100,
                                        .regular = regular,
                                        .foreign = foreign_to(file)};
    return 1;
}

/* A link is opened itself, not what it names. */
static HANDLE open_path(const wchar_t *path, DWORD access) {
    return CreateFileW(path, access | READ_CONTROL, FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, NULL,
                       OPEN_EXISTING, FILE_FLAG_BACKUP_SEMANTICS | FILE_FLAG_OPEN_REPARSE_POINT, NULL);
}

/* ---- folders ---- */

/* Of the user, the administrators and the system, and of nobody else; what is made inside inherits it. */
static void make_folder(const char *path) {
    wchar_t wide[SYSTEM_PATH_BYTES];
    SECURITY_ATTRIBUTES only = {.nLength = sizeof only};
    if (!windows_wide(path, wide, SYSTEM_PATH_BYTES) ||
        !ConvertStringSecurityDescriptorToSecurityDescriptorW(L"D:P(A;OICI;FA;;;OW)(A;OICI;FA;;;BA)(A;OICI;FA;;;SY)",
                                                              SDDL_REVISION_1, &only.lpSecurityDescriptor, NULL))
        return;
    CreateDirectoryW(wide, &only);
    LocalFree(only.lpSecurityDescriptor);
}

const char *system_last_name(const char *path) {
    const char *last = path;
    for (const char *at = path; *at; at++)
        if (*at == '/' || *at == '\\' || (*at == ':' && at == path + 1))
            last = at + 1;
    return last;
}

void system_make_folders(char *path) {
    for (char *at = path + 1; *at; at++)
        if ((*at == '/' || *at == '\\') && at[-1] != ':') {
            const char divider = *at;
            *at = 0;
            make_folder(path);
            *at = divider;
        }
    make_folder(path);
}

int system_open_folder(struct system_folder *folder, const char *path, struct system_file_facts *facts) {
    wchar_t wide[SYSTEM_PATH_BYTES];
    errno = ENOENT;
    if (strlen(path) >= sizeof folder->path || !windows_wide(path, wide, SYSTEM_PATH_BYTES))
        return 0;
    strcpy(folder->path, path);
    const HANDLE file = open_path(wide, FILE_READ_ATTRIBUTES);
    if (file == INVALID_HANDLE_VALUE) {
        windows_set_errno();
        return 0;
    }
    const int right = read_facts(file, facts) && GetFileAttributesW(wide) & FILE_ATTRIBUTE_DIRECTORY;
    folder->handle = (intptr_t)file;
    if (!right) {
        errno = ENOTDIR;
        CloseHandle(file);
    }
    return right;
}
void system_close_folder(struct system_folder *folder) { CloseHandle((HANDLE)folder->handle); }

struct walk_state {
    HANDLE search;
    WIN32_FIND_DATAW entry;
    int read; /* `entry` holds one that was not given */
};

int system_begin_walk(struct system_walk *walk, const struct system_folder *folder) {
    wchar_t wide[WHOLE_BYTES];
    struct walk_state *state = malloc(sizeof *state);
    walk->folder = folder;
    walk->state = state;
    if (!state || !wide_path(folder, "*", wide)) {
        free(state);
        return 0;
    }
    state->search = FindFirstFileW(wide, &state->entry);
    state->read = state->search != INVALID_HANDLE_VALUE;
    return 1;
}

int system_walk_on(struct system_walk *walk) {
    struct walk_state *state = walk->state;
    while (state->read || (state->search != INVALID_HANDLE_VALUE && FindNextFileW(state->search, &state->entry))) {
        wchar_t wide[WHOLE_BYTES];
        state->read = 0;
        if (!windows_narrow(state->entry.cFileName, walk->name, sizeof walk->name) ||
            !wide_path(walk->folder, walk->name, wide))
            continue;
        const HANDLE file = open_path(wide, FILE_READ_ATTRIBUTES);
        if (file == INVALID_HANDLE_VALUE)
            continue;
        const int told = read_facts(file, &walk->facts);
        CloseHandle(file);
        if (told)
            return 1;
    }
    return 0;
}

void system_end_walk(struct system_walk *walk) {
    struct walk_state *state = walk->state;
    if (state->search != INVALID_HANDLE_VALUE)
        FindClose(state->search);
    free(state);
}

/* ---- files ---- */

static FILE *take_file(HANDLE file, struct system_file_facts *facts) {
    if (file == INVALID_HANDLE_VALUE)
        return NULL;
    const int number =
        read_facts(file, facts) && facts->regular ? _open_osfhandle((intptr_t)file, _O_RDONLY | _O_BINARY) : -1;
    if (number < 0) {
        CloseHandle(file);
        return NULL;
    }
    FILE *stream = _fdopen(number, "rb");
    if (!stream)
        _close(number);
    return stream;
}

FILE *system_open_in(const struct system_folder *folder, const char *name, struct system_file_facts *facts) {
    wchar_t wide[WHOLE_BYTES];
    if (!wide_path(folder, name, wide))
        return NULL;
    const HANDLE file = open_path(wide, GENERIC_READ | FILE_WRITE_ATTRIBUTES);
    return take_file(file == INVALID_HANDLE_VALUE ? open_path(wide, GENERIC_READ) : file, facts);
}
FILE *system_open_file(const char *path, struct system_file_facts *facts) {
    wchar_t wide[WHOLE_BYTES];
    return windows_wide(path, wide, WHOLE_BYTES) ? take_file(open_path(wide, GENERIC_READ), facts) : NULL;
}

void system_touch(FILE *file) {
    FILETIME now;
    GetSystemTimeAsFileTime(&now);
    SetFileTime((HANDLE)_get_osfhandle(_fileno(file)), NULL, NULL, &now);
}

int system_remove_in(const struct system_folder *folder, const char *name) {
    wchar_t wide[WHOLE_BYTES];
    if (wide_path(folder, name, wide) && DeleteFileW(wide))
        return 1;
    windows_set_errno();
    return 0;
}

int system_may_write(size_t bytes) { return bytes > 0; }

static int write_all(HANDLE file, const void *data, size_t bytes) {
    const char *at = data;
    while (bytes > 0) {
        DWORD written = 0;
        if (!WriteFile(file, at, bytes < (1 << 30) ? (DWORD)bytes : 1 << 30, &written, NULL) || !written)
            return 0;
        at += written;
        bytes -= written;
    }
    return 1;
}

int system_replace_in(const struct system_folder *folder, const char *name, const void *head, size_t head_bytes,
                      const void *body, size_t body_bytes) {
    wchar_t path[WHOLE_BYTES], temporary[WHOLE_BYTES + 32];
    LARGE_INTEGER ticks;
    QueryPerformanceCounter(&ticks);
    if (!wide_path(folder, name, path))
        return 0;
    swprintf(temporary, WHOLE_BYTES + 32, L"%ls.%08lx%08lx", path, (unsigned long)GetCurrentProcessId(),
             (unsigned long)(ticks.QuadPart ^ (uintptr_t)&ticks >> 4));
    const HANDLE file = CreateFileW(temporary, GENERIC_WRITE, 0, NULL, CREATE_NEW, FILE_ATTRIBUTE_NORMAL, NULL);
    if (file == INVALID_HANDLE_VALUE)
        return 0;
    int whole = write_all(file, head, head_bytes) && write_all(file, body, body_bytes) && FlushFileBuffers(file);
    whole = CloseHandle(file) && whole;
    if (whole && MoveFileExW(temporary, path, MOVEFILE_REPLACE_EXISTING))
        return 1;
    DeleteFileW(temporary);
    return 0;
}
