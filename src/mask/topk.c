/* topk.c: stub. */
typedef int stub_topk;
