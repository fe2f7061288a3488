"""Memory: who holds which KVs, and where: rows, the index of prefixes, and stores beside the device."""
