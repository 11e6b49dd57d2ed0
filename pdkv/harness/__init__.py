"""The correctness harness: does prefill/decode give the very tokens that one engine gives?"""
