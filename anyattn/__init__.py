"""anyattn"""
