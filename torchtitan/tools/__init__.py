"""Small things every layer above uses: files local and remote, the log, the device, garbage collection."""
