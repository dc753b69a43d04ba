"""Inductor: what generates code. Importing `compiler` takes two seconds, so only what generates does that."""

from dta_compile.torch_compat import needed_for

with needed_for("generated code"):
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir
