/* count_arguments.h: how many arguments a macro was given. */
#ifndef FDM_COUNT_ARGUMENTS_H
#define FDM_COUNT_ARGUMENTS_H

/* How many arguments there are, to 48. */
#define COUNT_ARGUMENTS(...)                                                                                           \
    NUMBER_49(__VA_ARGS__, 48, 47, 46, 45, 44, 43, 42, 41, 40, 39, 38, 37, 36, 35, 34, 33, 32, 31, 30, 29, 28, 27, 26, \
              25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)
#define NUMBER_49(n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11, n12, n13, n14, n15, n16, n17, n18, n19, n20, n21, n22, \
                  n23, n24, n25, n26, n27, n28, n29, n30, n31, n32, n33, n34, n35, n36, n37, n38, n39, n40, n41, n42,  \
                  n43, n44, n45, n46, n47, n48, count, ...)                                                            \
    count

#endif
