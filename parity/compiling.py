"""Flags with which XLA compiles fast: a case is compiled once and run a few times.

Level 0 takes half of the compiler's time; without its fusion emitters and in one piece, that of a
loss with its gradients falls to two fifths again (3.6 s to 1.4 s). The results are the same to
rounding. XLA reads them when jax is imported; needs nothing.
"""

XLA_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1"
)
ONE_THREAD = f"{XLA_FLAGS} --xla_cpu_multi_thread_eigen=false"  # for processes that share cores
