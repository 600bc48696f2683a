/* machine.h: what tests do to the machine that they run on; machine_posix.c and machine_windows.c have it. */
#ifndef FDM_UNIT_MACHINE_H
#define FDM_UNIT_MACHINE_H

#include <stddef.h>

/* Sets a variable of the environment. value NULL: unsets it. */
void machine_set(const char *name, const char *value);
/* Makes a folder of a new name for the user alone; `path` receives it, divided by '/'. Returns 1 or 0. */
int machine_make_folder(char *path, size_t size);
/* Removes a folder with the files in it and in its folders. Returns 1 or 0. */
int machine_remove_all(const char *path);
/* Cuts a file. Returns 1 or 0. */
int machine_cut(const char *path, long bytes);
/* Lets everybody write a file or folder of the user's, or nobody but its owner. Returns 1 or 0. */
int machine_let_others_write(const char *path, int others);
/* Runs this program with the one argument `word`, in so many processes at once. Returns how many ended with 0. */
int machine_run_myself(const char *word, int count);

#endif
