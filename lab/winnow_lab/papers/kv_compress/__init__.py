"""KV-Compress (Rehg 2024), sections 5.4 to 5.7: throughput, decoding batch and accuracy against compression."""
