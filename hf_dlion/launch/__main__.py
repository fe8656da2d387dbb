"""`python -m hf_dlion.launch`, which launchers such as torchrun call."""

from hf_dlion.launch import main

if __name__ == "__main__":
    main()
