"""The kernels, in CuTe DSL. Only the build imports this package; the runtime never does.

  launcher.py            how the host code that launches a kernel is compiled
  forms.py               how the operands look to the copy engine and the tensor core
  scheduler.py           which work tile comes next, from group sizes that only the device knows
  pipeline.py            rings of shared memory stages between producers and consumers
  epilogue.py            accumulators to global memory, in 16 or 32-byte stores, and rows of zeros
  hopper_mainloop.py     the mainloop for sm_90a, and the CTA around it
  hopper.py              the grouped matmul for sm_90a
  hopper_outer.py        the outer product of groups, its weights' gradient, for sm_90a
  tcgen05.py             Blackwell's tensor core and its memory
  blackwell_mainloop.py  the mainloop for sm_100f, and the CTA around it
  blackwell.py           the grouped matmul for sm_100f
  blackwell_outer.py     the outer product of groups for sm_100f

On Hopper weights are the M operand and rows of lhs ("tokens") the N operand of the tensor
core: a group of 16 rows then costs an instruction of extent 16, not of 64. On Blackwell the
tile says which is which.
"""
