"""Selection: request + host facts + catalog rows -> a `Decision` that explains itself."""
