"""The inference server: vLLM behind routes of our own, whose weights are swapped while it runs.

    main, preflight   the program: what is checked before vLLM is imported
    server            the life of the engine and of the web server in front of it
    http              access, routes, bodies of requests
    generate          token ids in, token ids and log-probabilities out
    weights           reading, checking and swapping weights
    vllm_engine       vLLM, set up from our configuration
    ownership         which run the server is for
    metrics           what it counts about itself

Nothing else of the project imports vLLM.
"""
