"""Other engines beside Winnow; scripts named *_peer.py run in the environments of these engines, alone."""
