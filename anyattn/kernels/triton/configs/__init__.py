"""Tile configurations per architecture, as data: tuned offline, none at run time."""

from anyattn.kernels.triton.configs.choose import Decode, Extend, choose_decode, choose_extend

__all__ = ["Decode", "Extend", "choose_decode", "choose_extend"]
