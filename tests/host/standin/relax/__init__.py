"""A stand-in for Relax: our own code with the module paths, names, signatures and habits of the host, so that the
plugin can be tested end to end where Relax itself cannot be installed. ``standin/line.py`` says which line it imitates;
``README.md`` beside this package what is real and what is not.
"""
