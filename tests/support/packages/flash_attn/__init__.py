"""A stand-in for the package flash-attn, which needs a GPU."""

from flash_attn.flash_attn_interface import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def flash_attn_with_kvcache(*arguments, **keywords):
    raise NotImplementedError
