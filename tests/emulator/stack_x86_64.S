/* stack_x86_64.S: emu_stack_switch(void **save, void *to): keeps the callee's registers and goes on another stack. */
#if defined(__x86_64__)
    .text
    .globl emu_stack_switch
    .hidden emu_stack_switch
    .type emu_stack_switch, @function
emu_stack_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size emu_stack_switch, . - emu_stack_switch
#endif
#if defined(__linux__) && defined(__ELF__)
    .section .note.GNU-stack, "", %progbits
#endif
