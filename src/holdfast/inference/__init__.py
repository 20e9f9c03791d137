"""The inference server: vLLM with our own routes, and weights that can be swapped while it runs.

    main, preflight       the program, and the checks before vLLM is imported
    server                starts, serves and ends the engine and the web server in front of it
    routes, access        routes, who may use them, the run that owns the server, decoding of bodies
    generate              token ids in, token ids and log-probabilities out
    weights               which weights serve, and the one way to swap them
    weight_files          reads and checks published weights
    engine, worker        vLLM, set up from our configuration, and our part of its worker process
    metrics               what the server counts about itself

Nothing else of the project imports vLLM.
"""
