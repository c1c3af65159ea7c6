"""Speculative decoding: trees, verify masks, acceptance, drafts. Public as `anyattn.speculative`."""

from anyattn.core.masks import TreeMaskMode, VerifyMask, tree_mask_numel
from anyattn.core.speculative.accept import Acceptance, accept, accept_on_device, reject_chain
from anyattn.core.speculative.compact import moves
from anyattn.core.speculative.draft import DraftInfo
from anyattn.core.speculative.ragged import RaggedTrees
from anyattn.core.speculative.tree import Tree, TreeBuilder
from anyattn.core.speculative.verify_mask import fill_tree_mask

__all__ = [
    "Acceptance",
    "DraftInfo",
    "RaggedTrees",
    "Tree",
    "TreeBuilder",
    "TreeMaskMode",
    "VerifyMask",
    "accept",
    "accept_on_device",
    "fill_tree_mask",
    "moves",
    "reject_chain",
    "tree_mask_numel",
]
