/* machine_windows.c: machine.h on Windows. Paths are ASCII here. */
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

#include <aclapi.h>
#include <fcntl.h>
#include <io.h>
#include <process.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "machine.h"

void machine_set(const char *name, const char *value) { _putenv_s(name, value ? value : ""); }

/* In the user's folder of temporary files: those made in it are the user's. */
int machine_make_folder(char *path, size_t size) {
    char above[MAX_PATH];
    const DWORD length = GetTempPathA(sizeof above, above);
    if (!length || length >= sizeof above)
        return 0;
    const int written = snprintf(path, size, "%sfdm-test-%08lx%08llx", above, (unsigned long)GetCurrentProcessId(),
                                 (unsigned long long)GetTickCount64());
    for (char *at = path; *at; at++)
        if (*at == '\\')
            *at = '/';
    return written < (int)size && CreateDirectoryA(path, NULL) && machine_let_others_write(path, 0);
}

int machine_remove_all(const char *path) {
    char each[MAX_PATH];
    WIN32_FIND_DATAA entry;
    snprintf(each, sizeof each, "%s/*", path);
    const HANDLE search = FindFirstFileA(each, &entry);
    for (int more = search != INVALID_HANDLE_VALUE; more; more = FindNextFileA(search, &entry)) {
        snprintf(each, sizeof each, "%s/%s", path, entry.cFileName);
        if (!(entry.dwFileAttributes & FILE_ATTRIBUTE_DIRECTORY))
            DeleteFileA(each);
        else if (strcmp(entry.cFileName, ".") != 0 && strcmp(entry.cFileName, "..") != 0)
            machine_remove_all(each);
    }
    if (search != INVALID_HANDLE_VALUE)
        FindClose(search);
    return RemoveDirectoryA(path);
}

int machine_cut(const char *path, long bytes) {
    const int file = _open(path, _O_RDWR | _O_BINARY);
    const int cut = file >= 0 && _chsize(file, bytes) == 0;
    if (file >= 0)
        _close(file);
    return cut;
}

/* A list of its own, of the user and, where asked for, everybody. */
int machine_let_others_write(const char *path, int others) {
    union {
        TOKEN_USER user;
        char bytes[256];
    } token;
    char everybody[SECURITY_MAX_SID_SIZE], name[MAX_PATH];
    DWORD size = sizeof everybody, used;
    HANDLE process;
    PACL list = NULL;
    if (!OpenProcessToken(GetCurrentProcess(), TOKEN_QUERY, &process))
        return 0;
    const int known = GetTokenInformation(process, TokenUser, &token, sizeof token, &used) != 0;
    CloseHandle(process);
    if (!known || !CreateWellKnownSid(WinWorldSid, NULL, everybody, &size))
        return 0;
    EXPLICIT_ACCESSA entries[2];
    for (int n = 0; n < 2; n++)
        entries[n] = (EXPLICIT_ACCESSA){
            .grfAccessPermissions = FILE_ALL_ACCESS,
            .grfAccessMode = GRANT_ACCESS,
            .grfInheritance = NO_INHERITANCE,
            .Trustee = {.TrusteeForm = TRUSTEE_IS_SID, .ptstrName = n ? everybody : (char *)token.user.User.Sid}};
    if (SetEntriesInAclA(others ? 2 : 1, entries, NULL, &list) != ERROR_SUCCESS)
        return 0;
    snprintf(name, sizeof name, "%s", path);
    const DWORD failed = SetNamedSecurityInfoA(
        name, SE_FILE_OBJECT, DACL_SECURITY_INFORMATION | PROTECTED_DACL_SECURITY_INFORMATION, NULL, NULL, list, NULL);
    LocalFree(list);
    return failed == ERROR_SUCCESS;
}

int machine_run_myself(const char *word, int count) {
    enum { MOST = 64 };
    char path[MAX_PATH], quoted[MAX_PATH + 2];
    intptr_t children[MOST];
    int fine = 0, started = 0, status;
    if (count > MOST || !GetModuleFileNameA(NULL, path, sizeof path))
        return 0;
    snprintf(quoted, sizeof quoted, "\"%s\"", path);
    while (started < count && (children[started] = _spawnl(_P_NOWAIT, path, quoted, word, NULL)) != -1)
        started++;
    for (int n = 0; n < started; n++)
        fine += _cwait(&status, children[n], 0) != -1 && status == 0;
    return fine;
}
