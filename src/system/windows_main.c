/* windows_main.c: the beginning of a program on Windows: main() gets its words in UTF-8. Linked by -municode. */
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

#include <stdlib.h>

int main(int argc, char **argv);
int wmain(int argc, wchar_t **words);

static char *narrow(const wchar_t *word) {
    const int size = WideCharToMultiByte(CP_UTF8, 0, word, -1, NULL, 0, NULL, NULL);
    char *text = size > 0 ? malloc((size_t)size) : NULL;
    if (text)
        WideCharToMultiByte(CP_UTF8, 0, word, -1, text, size, NULL, NULL);
    return text;
}

int wmain(int argc, wchar_t **words) {
    char **argv = calloc((size_t)argc + 1, sizeof *argv);
    for (int n = 0; argv && n < argc; n++)
        if (!(argv[n] = narrow(words[n])))
            argv = NULL;
    if (!argv) {
        SetLastError(ERROR_NOT_ENOUGH_MEMORY);
        ExitProcess(ERROR_NOT_ENOUGH_MEMORY);
    }
    return main(argc, argv);
}
