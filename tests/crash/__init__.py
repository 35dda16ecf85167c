"""Every point at which a crash can fall, built from recorded histories and started from again."""
