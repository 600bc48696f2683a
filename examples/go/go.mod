module flash-dmattn/examples/go

go 1.19
