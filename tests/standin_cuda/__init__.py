"""A CUDA device made of CPU memory, for tests of what a GPU would refuse or wait for.

Its tensors say that they are on cuda:0 and hold real numbers, so a whole `Trainer(accelerator=
"gpu").fit` runs on it and must give the CPU's numbers. It keeps CUDA's rules about devices, and
counts what makes the host wait, by lrl's line. It has no streams, no memory of
its own and one rank.

    python -m tests.standin_cuda                      every case, on the CPU and on the stand-in
    python -m tests.standin_cuda --device gpu         and on a real GPU

A process that uses it loads it before torch (`guard.cpp`), so it has a process of
its own.
"""
