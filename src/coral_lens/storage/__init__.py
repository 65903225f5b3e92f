"""Files on disk: atomic writes and digests, checked shards, resumable work, arrays larger than memory."""
