"""Pool classes, one layout family a file."""
